"""Resolve capacities and bandwidths from a HardwareConfig and the devices of this host, and build
TorchRec's Topology.

TorchRec's defaults are a 32 GB V100; they are never used here. Values that the config does not set
are probed from the device. An error names the keys that no device can answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from torchrec.distributed.planner import types as torchrec_planner
from torchrec.distributed.planner.types import Topology

from pipeline import devices
from pipeline.config.planner import HardwareConfig, PlannerConfig
from pipeline.devices.base import Device
from pipeline.planner.cards import PCIE, Card, find_card, is_mig_slice
from pipeline.runtime.errors import PlanError
from pipeline.runtime.host_memory import host_memory_bytes

GIB = 1 << 30
BYTES_PER_MS = 1e6  # in one GB/s
PROBE_STEP_BYTES = GIB // 4


@dataclass(frozen=True)
class Hardware:
    """One rank's capacities in bytes and bandwidths in GB/s. On cpu both hbm_ values are 0.

    `local_world_size` ranks are connected with the intra_host values: the ranks of one host, or of
    all `hosts_per_nvlink_domain` hosts that NVLink joins.
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
        """Return the number of hosts, or of NVLink domains of several hosts."""
        return self.world_size // self.local_world_size

    @property
    def ranks_per_host(self) -> int:
        return self.local_world_size // self.hosts_per_nvlink_domain


def resolve_hardware(
    config: HardwareConfig, world_size: int, *, local_world_size: int | None = None, device_type: str | None = None
) -> Hardware:
    """Fill in what the config does not set, from the devices of this host.

    A running rank passes its `local_world_size` and `device_type`. A plan for other hardware passes
    neither.

    Raises:
        PlanError: a value is neither set nor can be probed, ranks do not fill complete hosts, or the hardware is of
            another kind than the running rank's.
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
        hbm_cap_bytes=_bytes(config, "hbm_cap_gb", partial(_probe_hbm_bytes, device)) if has_hbm else 0,
        ddr_cap_bytes=_bytes(config, "ddr_cap_gb", lambda: host_memory_bytes() // local),
        hbm_gb_per_s=_bandwidth(config, "hbm_gb_per_s", partial(_probe_hbm_gb_per_s, device)) if has_hbm else 0.0,
        ddr_gb_per_s=_bandwidth(config, "ddr_gb_per_s"),
        hbm_to_ddr_gb_per_s=_link(config, "hbm_to_ddr_gb_per_s", device) if has_hbm else 0.0,
        intra_host_gb_per_s=_link(config, "intra_host_gb_per_s", device),
        inter_host_gb_per_s=_bandwidth(config, "inter_host_gb_per_s"),
        ssd_cap_bytes=int(config.ssd_cap_gb * GIB) if has_hbm else 0,
        ssd_gb_per_s=config.ssd_gb_per_s if has_hbm else 0.0,
        **{name: _latency(config, name, default) for name, default in device.latencies_us.items()},
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
    """Build the topology of TorchRec's planner, in bytes and bytes/ms."""

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
            # On cpu TorchRec puts these two into a table of all kernels and then reads only the
            # cpu's.
            hbm_mem_bw=speed(hardware.hbm_gb_per_s or hardware.ddr_gb_per_s),
            hbm_to_ddr_mem_bw=speed(hardware.hbm_to_ddr_gb_per_s or hardware.ddr_gb_per_s),
            ddr_mem_bw=speed(hardware.ddr_gb_per_s),
        ),
        # Without the flag TorchRec (1.8 and 1.9) uses its defaults instead of every bandwidth
        # above.
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
    # Rounded down, because a driver or kernel update changes the total by some MiB, and a plan file
    # must survive it.
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


def _latency(config: HardwareConfig, name: str, default: float) -> float:
    value = getattr(config, name)
    return float(default if value is None else value)


def _link(config: HardwareConfig, name: str, device: Device) -> float:
    """For hardware=auto: return the link of this host's card, or PCIe's."""
    card = _card_at_hand(config, device) if getattr(config, name) is None else None
    if card is not None:
        return float(getattr(card, name))
    return _bandwidth(config, name, (lambda: PCIE) if config.compute_device == "auto" else None)


def _peak(config: HardwareConfig, name: str, device: Device) -> float | None:
    given: float | None = getattr(config, name)
    card = _card_at_hand(config, device) if given is None else None
    return given if card is None else float(getattr(card, name))


def _card_at_hand(config: HardwareConfig, device: Device) -> Card | None:
    """For hardware=auto: return the card of this host. A preset is complete."""
    return find_card(device.card_name()) if config.compute_device == "auto" else None


def _probe_hbm_bytes(device: Device) -> int:
    return _here(device, "hbm_cap_gb").memory_bytes()


def _probe_hbm_gb_per_s(device: Device) -> float:
    """Return the bandwidth in the card's data sheet, or the peak of an unknown card.

    Raises:
        PlanError: for a MIG slice, which has a part of the bus, because torch reports the card's.
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
    """Return `device`, from which `name` is probed.

    Raises PlanError if this host has no such device.
    """
    if not device.is_available():
        raise PlanError(
            f"hardware.{name} is not set and torch sees no GPU to probe it from; "
            "use a preset (hardware=h100_80gb), or hardware=cpu"
        )
    return device
