"""Resolve capacities and bandwidths of hardware, estimate its collectives, and build TorchRec's Topology.

TorchRec's defaults are a 32 GB V100; they are never used here. Values that the config does not set
are probed from the devices of this host, or taken from the card's data sheet. An error names the
keys that no device can answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from torchrec.distributed.planner import types as torchrec_planner
from torchrec.distributed.planner.types import Topology

from pipeline import devices
from pipeline.config.planner import HardwareConfig, PlannerConfig
from pipeline.devices.base import Device
from pipeline.planner.search.problem import Floats
from pipeline.runtime.errors import PlanError
from pipeline.runtime.host_memory import host_memory_bytes

GIB = 1 << 30
BYTES_PER_MS = 1e6  # in one GB/s
PROBE_STEP_BYTES = GIB // 4


@dataclass(frozen=True)
class Hardware:
    """Describe one rank: capacities in bytes and bandwidths in GB/s. On CPU both hbm_ values are 0.

    The links between `local_world_size` ranks have the intra_host values. These ranks are the ranks
    of one host, or of all `hosts_per_nvlink_domain` hosts that NVLink connects.
    """

    name: str
    compute_device: str
    world_size: int
    local_world_size: int
    hbm_cap_bytes: int
    ddr_cap_bytes: int
    hbm_gb_per_s: float
    ddr_gb_per_s: float
    hbm_to_ddr_gb_per_s: float
    intra_host_gb_per_s: float
    inter_host_gb_per_s: float
    ssd_cap_bytes: int
    ssd_gb_per_s: float
    collective_launch_us: float
    intra_host_latency_us: float
    inter_host_latency_us: float
    # Only for the prediction of steps. None: the config does not set it.
    tflops_fp32: float | None = None
    tflops_bf16: float | None = None
    issue_us: float | None = None
    hosts_per_nvlink_domain: int = 1

    @cached_property
    def device(self) -> Device:
        return devices.named(self.compute_device)

    @property
    def on_cpu(self) -> bool:
        return not self.device.has_own_memory

    @property
    def memory_gb_per_s(self) -> float:
        """Return the bandwidth of the memory in which a rank computes."""
        return self.ddr_gb_per_s if self.on_cpu else self.hbm_gb_per_s

    def fastest_bytes(self, hbm_bytes: int, ddr_bytes: int) -> int:
        """Return the bytes of the memory in which a rank computes."""
        return ddr_bytes if self.on_cpu else hbm_bytes

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts. If NVLink domains have several hosts, return the number of domains."""
        return self.world_size // self.local_world_size

    @property
    def ranks_per_host(self) -> int:
        return self.local_world_size // self.hosts_per_nvlink_domain


def resolve_hardware(
    config: HardwareConfig, world_size: int, *, local_world_size: int | None = None, device_type: str | None = None
) -> Hardware:
    """Fill in what the config does not set, from the devices of this host.

    A running rank passes its `local_world_size` and `device_type`; a plan for other hardware passes
    neither. Raises PlanError if a value cannot be found, the ranks do not fill complete hosts, or
    the running rank's device is of another kind.
    """
    compute_device = _compute_device(config, device_type)
    device = devices.named(compute_device)
    local = local_world_size or min(world_size, config.ranks_per_host or device.count_here() or world_size)
    if world_size % local:
        raise PlanError(
            f"world_size={world_size} does not fill hosts of {local} ranks; "
            f"use a multiple of {local}, or set hardware.ranks_per_host"
        )
    joined = min(config.hosts_per_nvlink_domain, world_size // local)
    if world_size % (joined * local):
        raise PlanError(
            f"world_size={world_size} does not fill NVLink domains of {joined * local} ranks ({joined} hosts of "
            f"{local}); use a multiple of {joined * local}, or set hardware.hosts_per_nvlink_domain"
        )
    has_hbm = device.has_own_memory

    return Hardware(
        name=config.name,
        compute_device=compute_device,
        world_size=world_size,
        local_world_size=joined * local,
        hbm_cap_bytes=_bytes(config, "hbm_cap_gb", lambda: _here(device, "hbm_cap_gb").memory_bytes())
        if has_hbm
        else 0,
        ddr_cap_bytes=_bytes(config, "ddr_cap_gb", lambda: host_memory_bytes() // local),
        hbm_gb_per_s=_bandwidth(config, "hbm_gb_per_s", partial(_probe_hbm_gb_per_s, device)) if has_hbm else 0.0,
        ddr_gb_per_s=_bandwidth(config, "ddr_gb_per_s"),
        hbm_to_ddr_gb_per_s=_link(config, "hbm_to_ddr_gb_per_s", device) if has_hbm else 0.0,
        intra_host_gb_per_s=_link(config, "intra_host_gb_per_s", device),
        inter_host_gb_per_s=_bandwidth(config, "inter_host_gb_per_s"),
        ssd_cap_bytes=int(config.ssd_cap_gb * GIB) if has_hbm else 0,
        ssd_gb_per_s=config.ssd_gb_per_s if has_hbm else 0.0,
        **{name: float(_given(config, name, default)) for name, default in device.latencies_us.items()},
        tflops_fp32=_peak(config, "tflops_fp32", device),
        tflops_bf16=_peak(config, "tflops_bf16", device),
        issue_us=config.issue_us,
        hosts_per_nvlink_domain=joined,
    )


def available_memory(config: PlannerConfig, hardware: Hardware) -> float:
    """Return the usable bytes of a rank's fastest memory, before the dense part is subtracted."""
    capacity = hardware.fastest_bytes(hardware.hbm_cap_bytes, hardware.ddr_cap_bytes)
    return capacity * (1 - config.reserved_memory_fraction)


def build_topology(hardware: Hardware) -> Topology:
    """Build the Topology for TorchRec's planner, in bytes and bytes/ms."""

    def speed(gb_per_s: float) -> float:
        return gb_per_s * BYTES_PER_MS

    topology = torchrec_planner.TopologyFactory.create_topology(
        torchrec_planner.TrainerConfig(
            world_size=hardware.world_size,
            local_world_size=hardware.ranks_per_host,
            pod_size=hardware.hosts_per_nvlink_domain,
        ),
        torchrec_planner.HardwareConfig(
            hbm_cap_bytes=hardware.hbm_cap_bytes,
            ddr_cap_bytes=hardware.ddr_cap_bytes,
            ssd_cap_bytes=hardware.ssd_cap_bytes,
            intra_host_bw=speed(hardware.intra_host_gb_per_s),
            inter_host_bw=speed(hardware.inter_host_gb_per_s),
            # On cpu TorchRec reads only the cpu's.
            hbm_mem_bw=speed(hardware.hbm_gb_per_s or hardware.ddr_gb_per_s),
            hbm_to_ddr_mem_bw=speed(hardware.hbm_to_ddr_gb_per_s or hardware.ddr_gb_per_s),
            ddr_mem_bw=speed(hardware.ddr_gb_per_s),
        ),
        # Without the flag TorchRec (1.8 and 1.9) uses its defaults instead.
        torchrec_planner.KernelConfig(compute_device=hardware.compute_device, use_hardware_based_bandwidth=True),
    )
    for device in topology.devices:
        # TorchRec 1.6 treats a capacity of 0 as missing, and has inserted its default: 2 TB of SSD.
        device.storage = torchrec_planner.Storage(
            hardware.hbm_cap_bytes, hardware.ddr_cap_bytes, ssd=hardware.ssd_cap_bytes
        )
    return topology


def _compute_device(config: HardwareConfig, device_type: str | None) -> str:
    if config.compute_device == "auto":
        return device_type or devices.best_here()
    if device_type is not None and config.compute_device != device_type:
        raise PlanError(
            f"hardware={config.name} is for {config.compute_device} but this rank runs on {device_type}; "
            "use hardware=auto, or a preset of this device"
        )
    return config.compute_device


def _bytes(config: HardwareConfig, name: str, probe: Callable[[], int]) -> int:
    given = getattr(config, name)
    if given is not None:
        return int(given * GIB)
    # Rounded down: a plan file must survive a driver update, which changes the total by some MiB.
    return probe() // PROBE_STEP_BYTES * PROBE_STEP_BYTES


def _bandwidth(config: HardwareConfig, name: str, probe: Callable[[], float] | None = None) -> float:
    value = getattr(config, name)
    if value is None and probe is not None:
        value = probe()
    if not value:
        raise PlanError(
            f"hardware={config.name} does not set {name}, and it cannot be probed; "
            f"set hardware.{name}=<GB/s>, or use a preset of conf/hardware"
        )
    return float(value)


def _given(config: HardwareConfig, name: str, default: float) -> float:
    value: float | None = getattr(config, name)
    return default if value is None else value


def _link(config: HardwareConfig, name: str, device: Device) -> float:
    """Return the GB/s of a link: the config's value, otherwise for hardware=auto the card's or PCIe's."""
    card = _card_at_hand(config, device) if getattr(config, name) is None else None
    if card is not None:
        return float(getattr(card, name))
    return _bandwidth(config, name, (lambda: PCIE) if config.compute_device == "auto" else None)


def _peak(config: HardwareConfig, name: str, device: Device) -> float | None:
    given: float | None = getattr(config, name)
    card = _card_at_hand(config, device) if given is None else None
    return given if card is None else float(getattr(card, name))


def _card_at_hand(config: HardwareConfig, device: Device) -> Card | None:
    """Return this host's card for hardware=auto, otherwise None, because a preset is complete."""
    return find_card(device.card_name()) if config.compute_device == "auto" else None


def _probe_hbm_gb_per_s(device: Device) -> float:
    """Return the GB/s of the card's data sheet, or torch's peak value if the card is unknown.

    Raises PlanError for a MIG slice: it uses a part of the bus, but torch reports the bandwidth of
    the whole card.
    """
    name = _here(device, "hbm_gb_per_s").card_name()
    if is_mig_slice(name):
        raise PlanError(
            f"this GPU is a part of a card ({name}), whose bandwidth cannot be probed; set "
            "hardware.hbm_gb_per_s=<GB/s>: the card's, times the part of its memory that the slice has"
        )
    card = find_card(name)
    return device.memory_gb_per_s() if card is None else card.hbm_gb_per_s


def _here(device: Device, name: str) -> Device:
    """Return the device from which the value `name` is probed. Raises PlanError if this host has no such device."""
    if not device.is_available():
        raise PlanError(
            f"hardware.{name} is not set and torch sees no GPU to probe it from; "
            "use a preset (hardware=h100_80gb), or hardware=cpu"
        )
    return device


PCIE = 25.0  # measured PCIe 4.0 bandwidth between two cards


@dataclass(frozen=True)
class Card:
    """Describe a card: bandwidths in GB/s in one direction, and peaks of matrix products in TFLOPS."""

    hbm_gb_per_s: float
    hbm_to_ddr_gb_per_s: float
    intra_host_gb_per_s: float
    tflops_fp32: float
    tflops_bf16: float


# The first words of torch's name, without "NVIDIA". NVIDIA's data sheets; bf16 without sparsity.
CARDS = {
    "A100-SXM4-40GB": Card(1555.0, 32.0, 300.0, 19.5, 312.0),
    "A100-SXM4-80GB": Card(2039.0, 32.0, 300.0, 19.5, 312.0),
    "A100-PCIE-40GB": Card(1555.0, 32.0, PCIE, 19.5, 312.0),
    "A100 80GB PCIe": Card(1935.0, 32.0, PCIE, 19.5, 312.0),
    "H100 80GB HBM3": Card(3350.0, 64.0, 450.0, 67.0, 989.0),
    "H100 PCIe": Card(2000.0, 64.0, PCIE, 51.0, 756.0),
    "H100 NVL": Card(3900.0, 64.0, PCIE, 60.0, 835.0),
    "H200": Card(4800.0, 64.0, 450.0, 67.0, 989.0),
    "H200 NVL": Card(4800.0, 64.0, PCIE, 60.0, 835.0),
    "B200": Card(7700.0, 64.0, 900.0, 75.0, 2250.0),
    "GB300": Card(8000.0, 225.0, 900.0, 80.0, 2500.0),
    "L40S": Card(864.0, 32.0, PCIE, 91.6, 362.0),
    "L4": Card(300.0, 32.0, PCIE, 30.3, 121.0),
}


def find_card(name: str) -> Card | None:
    """Return the card that torch.cuda calls `name`, or None if it is not listed."""
    words = name.removeprefix("NVIDIA ")
    found = [key for key in CARDS if words == key or words.startswith(f"{key} ")]
    return CARDS[max(found, key=len)] if found else None


def is_mig_slice(name: str) -> bool:
    """Return whether torch's device name is the name of a part of a GPU (... MIG 1g.5gb)."""
    return "MIG" in name.split()


# Of counts, of lengths, of ids, for each sharding type (torchrec/distributed/dist_data.py).
NUM_INPUT_ALL_TO_ALLS = 3


@dataclass(frozen=True)
class Links:
    """Describe the network of one of W ranks, which are on H hosts with L ranks each. Bandwidths
    are in bytes/ms and latencies in ms.

    S is the number of bytes that a rank sends or receives. As in TorchRec, S includes the rank's
    part for itself.
    """

    world_size: int
    local_world_size: int
    intra: float
    inter: float
    launch_ms: float
    intra_hop_ms: float
    inter_hop_ms: float

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.local_world_size

    def all_to_all_ms(self, num_bytes: Floats) -> Floats:
        """Return the milliseconds of an all-to-all: (L-1)/W of S goes to ranks of the same host,
        (W-L)/W to other hosts.

        The slower of the two links counts, because all sends start at once and the links are
        separate.
        """
        world, local = self.world_size, self.local_world_size
        return np.maximum(
            num_bytes * (local - 1) / world / self.intra, num_bytes * (world - local) / world / self.inter
        )

    def ring_ms(self, num_bytes: Floats) -> Floats:
        """Return the milliseconds of a reduce-scatter or all-gather of S, in which (W-1)/W of S
        passes every rank.

        Each of a host's L ring channels leaves through another rank's port, so hosts are connected
        by L ports (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
        """
        joined = self.local_world_size * self.inter
        speed = self.intra if self.num_hosts == 1 else min(self.intra, joined) if self.local_world_size > 1 else joined
        return num_bytes * (self.world_size - 1) / self.world_size / speed

    def host_ring_ms(self, num_bytes: Floats) -> Floats:
        return num_bytes * (self.local_world_size - 1) / self.local_world_size / self.intra

    def across_hosts_ms(self, num_bytes: Floats) -> Floats:
        """Return the milliseconds of an all-to-all among ranks with equal positions on hosts. 1/H of S stays local."""
        return num_bytes * (self.num_hosts - 1) / self.num_hosts / self.inter

    def latencies_ms(self) -> dict[str, Floats]:
        """Return sharding type -> [PHASES]: the milliseconds until the collectives of the type send
        the first byte.

        As in NCCL's tuner (src/graph/tuning.cc): a launch, and one hop for each step of a ring, of
        which H hops leave a host. For an all-to-all only the longest hop counts.
        """
        if self.world_size == 1:
            return {}
        far = self.inter_hop_ms if self.num_hosts > 1 else self.intra_hop_ms
        all_to_all = self.launch_ms + far
        inter_steps = self.num_hosts - 1
        ring = (
            self.launch_ms + (self.world_size - 1 - inter_steps) * self.intra_hop_ms + inter_steps * self.inter_hop_ms
        )
        in_host = self.launch_ms + (self.local_world_size - 1) * self.intra_hop_ms
        by_host = in_host + (self.launch_ms + self.inter_hop_ms if self.num_hosts > 1 else 0.0)
        ids = NUM_INPUT_ALL_TO_ALLS * all_to_all
        whole, rows, host = [ids, 0, all_to_all, 0, all_to_all], [ids, 0, ring, 0, ring], [ids, 0, by_host, 0, by_host]
        kinds = {
            "table_wise": whole,
            "column_wise": whole,
            "table_column_wise": whole,
            "row_wise": rows,
            "table_row_wise": host,
            "grid_shard": host,
            # an all-reduce passes the ring twice
            "data_parallel": [0, 0, 0, 0, 2 * ring - self.launch_ms],
        }
        return {kind: np.array(phases, dtype=float) for kind, phases in kinds.items()}


def links_of(hardware: Hardware) -> Links:
    return Links(
        world_size=hardware.world_size,
        local_world_size=hardware.local_world_size,
        intra=hardware.intra_host_gb_per_s * BYTES_PER_MS,
        inter=hardware.inter_host_gb_per_s * BYTES_PER_MS,
        launch_ms=hardware.collective_launch_us / 1e3,
        intra_hop_ms=hardware.intra_host_latency_us / 1e3,
        inter_hop_ms=hardware.inter_host_latency_us / 1e3,
    )
