from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.planner import HardwareConfig
from pipeline.planner.hardware import GIB, Card, build_topology, find_card, links_of, resolve_hardware
from pipeline.planner.plan_record import RankLoad
from pipeline.runtime.errors import PlanError
from pipeline.runtime.host_memory import host_memory_bytes
from pipeline.training.sharded_model import check_host_copy
from tests.planner.problems import on, preset
from tests.support.messages import names
from tests.support.sources import shipped_options

GPU_PRESETS = ("a100_40gb", "a100_80gb", "b200", "h100_80gb", "h200", "l40s", "mi355x")


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_gpu_preset_needs_no_gpu_and_reaches_torchrec_unchanged(name: str) -> None:
    config, topology = vars(preset(name)), build_topology(on(name, 16))
    assert topology.compute_device == "cuda"
    assert (topology.world_size, topology.local_world_size) == (16, 8)
    for device in topology.devices:
        assert device.storage.hbm == config["hbm_cap_gb"] * GIB
        assert device.storage.ddr == config["ddr_cap_gb"] * GIB
        assert device.storage.ssd == 0
    assert topology.hbm_mem_bw == config["hbm_gb_per_s"] * 1e6
    assert topology.ddr_mem_bw == config["ddr_gb_per_s"] * 1e6
    assert topology.hbm_to_ddr_mem_bw == config["hbm_to_ddr_gb_per_s"] * 1e6
    assert topology.intra_host_bw == config["intra_host_gb_per_s"] * 1e6
    assert topology.inter_host_bw == config["inter_host_gb_per_s"] * 1e6


def test_every_preset_is_named_as_its_file() -> None:
    assert set(shipped_options()["hardware"]) == {"auto", "cpu", "cpu_8gb", "gb300", *GPU_PRESETS}
    for name in shipped_options()["hardware"]:
        assert preset(name).name == name


def test_cpu_ranks_share_the_host_memory_and_have_no_hbm() -> None:
    topology = build_topology(on("cpu", 2))
    for device in topology.devices:
        assert device.storage.hbm == 0
        assert host_memory_bytes() // 2 - GIB // 4 < device.storage.ddr <= host_memory_bytes() // 2
        assert device.storage.ddr % (GIB // 4) == 0


def give_gpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two of them."""
    properties = SimpleNamespace(
        total_memory=int(139.81 * GIB), memory_clock_rate=3_201_000, memory_bus_width=6144, name=name
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


FIGURES = [field.name for field in fields(Card)]
NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA A100-SXM4-80GB": "a100_80gb",
    "NVIDIA H100 80GB HBM3": "h100_80gb",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB300": "gb300",
    "NVIDIA L40S": "l40s",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_known_card_at_hand_has_its_presets_figures(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    give_gpus(monkeypatch, name)
    probed, stated = on("auto", 2), preset(NAMES[name])
    assert {key: getattr(probed, key) for key in FIGURES} == {key: getattr(stated, key) for key in FIGURES}
    assert on("auto", 2, intra_host_gb_per_s=7.0).intra_host_gb_per_s == 7.0


def test_cards_whose_names_begin_alike_are_told_apart() -> None:
    bandwidths = {"NVIDIA H200 NVL": 25.0, "NVIDIA L4": 25.0, "NVIDIA H100 PCIe": 25.0, "NVIDIA H200": 450.0}
    for name, expected in bandwidths.items():
        card = find_card(name)
        assert card is not None and card.intra_host_gb_per_s == expected
    assert find_card("NVIDIA L40") is None and find_card("NVIDIA GH200 480GB") is None


def test_the_bandwidth_of_a_mig_slice_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    with pytest.raises(PlanError, match=names("MIG hardware.hbm_gb_per_s")):
        on("auto", 1)
    assert on("auto", 1, hbm_gb_per_s=194.0).hbm_gb_per_s == 194.0


def test_a_gpu_at_hand_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, "NVIDIA of tomorrow")
    probed = on("auto", 4)
    assert probed.compute_device == "cuda"
    assert probed.hbm_cap_bytes == 139.75 * GIB  # a driver update that moves some MiB leaves plan files valid
    assert probed.hbm_gb_per_s == pytest.approx(4917, abs=1)
    assert probed.intra_host_gb_per_s == probed.hbm_to_ddr_gb_per_s == 25.0
    assert (probed.local_world_size, probed.num_hosts) == (2, 2)
    assert on("auto", 4, hbm_cap_gb=10.0).hbm_cap_bytes == 10 * GIB


def test_what_cannot_be_probed_is_asked_for_by_name() -> None:
    with pytest.raises(PlanError, match=names("ddr_gb_per_s hardware.ddr_gb_per_s=<GB/s>")):
        resolve_hardware(HardwareConfig(compute_device="cpu"), 1)
    with pytest.raises(PlanError, match=names("intra_host_gb_per_s")):
        on("cpu", 1, intra_host_gb_per_s=None)
    with pytest.raises(PlanError, match=names("ddr_gb_per_s")):
        on("cpu", 1, ddr_gb_per_s=0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to probe")
def test_no_gpu_is_made_up_where_there_is_none() -> None:
    with pytest.raises(PlanError, match=names("GPU")):
        on("auto", 1, compute_device="cuda")


def test_ranks_must_fill_their_hosts() -> None:
    with pytest.raises(PlanError, match=names("world_size=12")):
        on("h100_80gb", 12)
    assert on("h100_80gb", 2).local_world_size == 2


@pytest.mark.parametrize(("world_size", "hosts", "domains"), [(4, 1, 1), (16, 4, 1), (72, 18, 1), (144, 18, 2)])
def test_nvlink_joins_the_hosts_of_an_nvl72(world_size: int, hosts: int, domains: int) -> None:
    resolved = on("gb300", world_size)
    assert (resolved.ranks_per_host, resolved.hosts_per_nvlink_domain, resolved.num_hosts) == (4, hosts, domains)
    topology = build_topology(resolved)
    assert (topology.local_world_size, topology.intra_group_size) == (4, 4 * hosts)
    assert links_of(resolved).num_hosts == domains  # what the cost model sends at intra_host_gb_per_s


def test_a_rank_of_an_nvl72_sees_four_gpus_and_all_of_its_domain() -> None:
    running = resolve_hardware(preset("gb300"), 144, local_world_size=4, device_type="cuda")
    assert running == on("gb300", 144)


def test_ranks_must_fill_their_nvlink_domains() -> None:
    with pytest.raises(PlanError, match=names("world_size=80 72 18 hardware.hosts_per_nvlink_domain")):
        on("gb300", 80)
    assert on("gb300", 80, hosts_per_nvlink_domain=10).num_hosts == 2


def test_a_running_rank_knows_its_host_and_device_better() -> None:
    config = preset("cpu", ranks_per_host=8)
    assert resolve_hardware(config, 8, local_world_size=4, device_type="cpu").num_hosts == 2
    with pytest.raises(PlanError, match=names("hardware=h200 hardware=auto")):
        resolve_hardware(preset("h200"), 1, local_world_size=1, device_type="cpu")
    assert resolve_hardware(preset("auto"), 1, local_world_size=1, device_type="cpu").compute_device == "cpu"


def test_a_copy_for_asynchronous_saves_that_host_memory_does_not_hold_is_refused() -> None:
    loads = [RankLoad(rank, 60 << 30, rank << 30, 0, 0, 0, 0, 0, 0) for rank in range(2)]
    check_host_copy(loads, usable_ddr_bytes=63 << 30, dense_bytes=2 << 30)
    with pytest.raises(PlanError, match=names("rank 1's 62.00 GiB 61.50 GiB checkpoint.asynchronous=false")):
        check_host_copy(loads, usable_ddr_bytes=(62 << 30) + (512 << 20), dense_bytes=2 << 30)
