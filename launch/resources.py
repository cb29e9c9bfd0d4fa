"""Resolve the requested resources of a host to cores, GPUs and memory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

from pipeline.config.planner import HardwareConfig
from pipeline.runtime.errors import LaunchError, did_you_mean

if TYPE_CHECKING:
    from launch.workload import Where, Workload


@dataclass(frozen=True)
class Host:
    """Resources of a host. 0 cores, 0 MB or None for GPUs mean: not specified, the scheduler decides."""

    cpu: int = 0
    gpu: Optional[int] = None
    mem_mb: int = 0


# Hosts with 8 GPUs as three clouds offer them: cores, MiB of memory.
# aws.amazon.com/ec2/instance-types/p4, /p5;
# cloud.google.com/compute/docs/accelerator-optimized-machines;
# learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ndasra100v4-series, ndma100v4-,
# ndh100v5-, ndh200v5-series
CLOUD_HOSTS = {
    "a100_40gb_x8": {"p4d.24xlarge": (96, 1_179_648), "a2-highgpu-8g": (96, 648_498), "ND96asr_v4": (96, 921_600)},
    "a100_80gb_x8": {"p4de.24xlarge": (96, 1_179_648), "a2-ultragpu-8g": (96, 1_296_997), "ND96amsr_A100_v4": (96, 1_945_600)},
    "h100_80gb_x8": {"p5.48xlarge": (192, 2_097_152), "a3-highgpu-8g": (208, 1_785_278), "ND96isr_H100_v5": (96, 1_945_600)},
    "h200_141gb_x8": {"p5en.48xlarge": (192, 2_097_152), "a3-ultragpu-8g": (224, 2_815_246), "ND96isr_H200_v5": (96, 1_894_400)},
}  # fmt: skip
# The hardware preset (conf/hardware) of a host's cards, from the beginning of its name.
PRESETS = {name: name.removesuffix("_x8").replace("h200_141gb", "h200") for name in CLOUD_HOSTS}
CORES_A_RANK = 4  # for GPU ranks if not specified: the reader, the collectives and the rank itself
KEPT_CORES, KEPT_SHARE = 6, 0.08  # of a host, for its system, agents and daemon sets


def _on_every_cloud(sizes: dict[str, tuple[int, int]]) -> Host:
    cores, memory_mb = map(min, zip(*sizes.values(), strict=True))
    return Host(cpu=cores - KEPT_CORES, gpu=8, mem_mb=int(memory_mb * (1 - KEPT_SHARE)) // 1000 * 1000)


# TorchX's names (gpu.small, aws_p4d.24xlarge) work too. --cpu, --gpu and --memMB change single
# numbers of a named host.
NAMED_HOSTS = {
    "cpu_8": Host(cpu=8, gpu=0, mem_mb=30_000),
    "cpu_32": Host(cpu=32, gpu=0, mem_mb=120_000),
    **{name: _on_every_cloud(sizes) for name, sizes in CLOUD_HOSTS.items()},
}


def asked_host(cpu: Optional[int], gpu: Optional[int], mem_mb: Optional[int], h: Optional[str]) -> Host:
    """Return the named host `h` (if given), changed by the given numbers. Raises LaunchError."""
    host = Host() if h is None else named_host(h)
    asked = {"cpu": _number("cpu", cpu, 1), "gpu": _number("gpu", gpu, 0), "mem_mb": _number("memMB", mem_mb, 1)}
    return replace(host, **{name: number for name, number in asked.items() if number is not None})


def _number(flag: str, typed: "int | str | None", least: int) -> Optional[int]:
    """Parse a number of at least `least`. TorchX 0.7.0 passes an Optional[int] of a component as text."""
    if typed is None:
        return None
    if not str(typed).lstrip("-").isdecimal() or int(typed) < least:
        raise LaunchError(f"--{flag} {typed}: give a whole number of at least {least}, or remove it")
    return int(typed)


def named_host(name: str) -> Host:
    if name in NAMED_HOSTS:
        return NAMED_HOSTS[name]
    # TorchX's names, and names from other packages' entry points; a slow import
    from torchx import specs

    try:
        found = specs.named_resources[name]
    except KeyError:
        known = ", ".join(NAMED_HOSTS)
        raise LaunchError(
            f"-h {name} is not a named resource{did_you_mean(name, NAMED_HOSTS)}; known are "
            f"{known} and TorchX's names; or give --cpu, --gpu and --memMB"
        ) from None
    return Host(max(found.cpu, 0), max(found.gpu, 0), max(found.memMB, 0))


def this_host() -> Host:
    """Return the cores that this process may use and the memory of this machine, without GPUs."""
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return Host(len(os.sched_getaffinity(0)), 0, memory_mb)


def parse_shape(j: str) -> tuple[int, int]:
    """Return (nodes, ranks): '2x8' -> (2, 8), '8' -> (1, 8). Raises LaunchError, also for 2:4x8."""
    least, nodes, ranks = parse_elastic_shape(j)
    if least != nodes:
        raise LaunchError(f"-j {j}: only train supports a varying number of nodes; give -j {nodes}x{ranks}")
    return nodes, ranks


def parse_elastic_shape(j: str) -> tuple[int, int, int]:
    """Return (min nodes, max nodes, ranks per node): '2:4x8' -> (2, 4, 8). Raises LaunchError."""
    match = re.fullmatch(r"(?:(?:(\d+):)?(\d+)x)?(\d+)", j)
    nodes, ranks = (int(match[2] or 1), int(match[3])) if match else (0, 0)
    least = int(match[1] or nodes) if match else 0
    if not 1 <= least <= nodes or ranks < 1:
        raise LaunchError(
            f"-j {j} is not NODESxRANKS_PER_NODE or MIN:MAXxRANKS_PER_NODE with numbers of at "
            "least 1; for instance -j 1x2, -j 2x8 or -j 2:4x8"
        )
    return least, nodes, ranks


def with_hardware(words: list[str], where: Where) -> list[str]:
    """Return the overrides plus the hardware preset that --h or --gpu 0 implies, unless they name a preset."""
    gpus = asked_host(where.cpu, where.gpu, where.memMB, where.h).gpu
    preset = "cpu" if gpus == 0 else PRESETS.get(where.h or "")
    chosen = any(word.lstrip("+").startswith("hardware=") for word in words)
    return [f"hardware={preset}", *words] if preset and not chosen else words


def on_hardware(workload: Workload, where: Where, hardware: HardwareConfig) -> Workload:
    """Raise LaunchError if a host has too few GPUs for its ranks, or the preset is for other GPUs."""
    ranks, card = workload.ranks_per_node, PRESETS.get(where.h or "")
    on_gpus = hardware.compute_device == "cuda"
    if on_gpus and card and hardware.name in {*PRESETS.values()} - {card}:
        raise LaunchError(
            f"--h {where.h} is a host of {card} cards, but the job's hardware is {hardware.name}: "
            f"give hardware={card}, or another host"
        )
    if on_gpus and hardware.ranks_per_host and ranks > hardware.ranks_per_host:
        raise LaunchError(
            f"-j {workload.shape} starts {ranks} ranks on a host, but a host of {hardware.name} "
            f"has {hardware.ranks_per_host} GPUs: give -j with at most {hardware.ranks_per_host}, "
            "or hardware.ranks_per_host"
        )
    if workload.gpu and hardware.compute_device != "cpu":
        _check_ranks(workload, workload.gpu)
    return replace(workload, device=hardware.compute_device, hardware=hardware.name)


def _check_ranks(workload: Workload, gpus: int) -> None:
    ranks = workload.ranks_per_node
    if ranks > gpus:
        raise LaunchError(
            f"-j {workload.shape} starts {ranks} ranks on a host of {gpus} GPU(s), and each rank needs one: give -j "
            f"{-(-workload.nodes * ranks // gpus)}x{gpus}, or {ranks} GPUs per node (--gpu {ranks})"
        )


def on_cluster(workload: Workload, gpus: Optional[int] = None) -> Workload:
    """Return the workload with the GPUs to request. gpus: GPUs per node in the scheduler's options.

    Raises LaunchError if no option names the hardware of several ranks, or if it does not fit them.
    """
    ranks, gpu = workload.ranks_per_node, workload.gpu if gpus is None else gpus
    if gpu is None and workload.device == "cuda":
        gpu = ranks
    if gpu is None and workload.device == "auto" and workload.nodes * ranks > 1:
        raise LaunchError(
            f"-j {workload.shape} starts {workload.nodes * ranks} ranks, but no option names "
            f"their hardware: give --gpu {ranks} (one GPU per rank), --h HOST (h100_80gb_x8, ...) "
            "or hardware=PRESET; for ranks on CPUs --gpu 0"
        )
    if workload.gpu is not None and gpu != workload.gpu:
        raise LaunchError(
            f"--gpu {workload.gpu}, but the scheduler's options request {gpu} GPU(s) per node: remove one of the two"
        )
    if workload.device == "cpu" and gpu:
        raise LaunchError(
            f"{gpu} GPU(s) per node are requested, but the job's hardware, {workload.hardware}, "
            "has none: remove them (--gpu 0), or give hardware=PRESET"
        )
    if workload.device == "cuda" and not gpu:
        raise LaunchError(
            f"the job's hardware, {workload.hardware}, has GPUs, but none is requested: give "
            f"--gpu {ranks}, or hardware=cpu"
        )
    if gpu and workload.device:
        _check_ranks(workload, gpu)
    if workload.device and workload.cpu and workload.cpu < ranks:
        raise LaunchError(
            f"--cpu {workload.cpu} is less than a core for each of the {ranks} ranks of a node: give --cpu {ranks * CORES_A_RANK}"
        )
    return replace(workload, gpu=gpu)
