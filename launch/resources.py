"""Resolve what is asked of a host, in numbers or by a named resource, to cores, GPUs and memory."""

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
    """0 cores or 0 MB, and None for the GPUs: nobody has said, the place decides."""

    cpu: int = 0
    gpu: Optional[int] = None
    mem_mb: int = 0


# Whole hosts with 8 GPUs as three clouds sell them: cores, MiB of memory.
#   aws.amazon.com/ec2/instance-types/p4, /p5; cloud.google.com/compute/docs/accelerator-optimized-machines;
#   learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ndasra100v4-series, ndma100v4-, ndh100v5-, ndh200v5-series
CLOUD_HOSTS = {
    "a100_40gb_x8": {"p4d.24xlarge": (96, 1_179_648), "a2-highgpu-8g": (96, 648_498), "ND96asr_v4": (96, 921_600)},
    "a100_80gb_x8": {"p4de.24xlarge": (96, 1_179_648), "a2-ultragpu-8g": (96, 1_296_997), "ND96amsr_A100_v4": (96, 1_945_600)},
    "h100_80gb_x8": {"p5.48xlarge": (192, 2_097_152), "a3-highgpu-8g": (208, 1_785_278), "ND96isr_H100_v5": (96, 1_945_600)},
    "h200_141gb_x8": {"p5en.48xlarge": (192, 2_097_152), "a3-ultragpu-8g": (224, 2_815_246), "ND96isr_H200_v5": (96, 1_894_400)},
}  # fmt: skip
# The hardware preset (conf/hardware) of a host's cards, as its name begins.
PRESETS = {name: name.removesuffix("_x8").replace("h200_141gb", "h200") for name in CLOUD_HOSTS}
CORES_A_RANK = 4  # of GPUs, where nobody has said: its reader, its collectives and itself
KEPT_CORES, KEPT_SHARE = 6, 0.08  # of a host, for its system, its agents and daemon sets


def _on_every_cloud(name: str) -> Host:
    cores, memory_mb = (min(sizes) for sizes in zip(*CLOUD_HOSTS[name].values(), strict=True))
    return Host(cpu=cores - KEPT_CORES, gpu=8, mem_mb=int(memory_mb * (1 - KEPT_SHARE)) // 1000 * 1000)


# TorchX's own names (gpu.small, aws_p4d.24xlarge) work too; --cpu, --gpu and --memMB change single numbers of a named one.
NAMED_HOSTS = {
    "cpu_8": Host(cpu=8, gpu=0, mem_mb=30_000),
    "cpu_32": Host(cpu=32, gpu=0, mem_mb=120_000),
    **{name: _on_every_cloud(name) for name in CLOUD_HOSTS},
}


def asked_host(cpu: Optional[int], gpu: Optional[int], mem_mb: Optional[int], h: Optional[str]) -> Host:
    """The named host `h`, if any, with the numbers that are given. Raises LaunchError for names and numbers that cannot be."""
    host = Host() if h is None else named_host(h)
    asked = {"cpu": _number("cpu", cpu, 1), "gpu": _number("gpu", gpu, 0), "mem_mb": _number("memMB", mem_mb, 1)}
    return replace(host, **{name: number for name, number in asked.items() if number is not None})


def _number(flag: str, typed: "int | str | None", least: int) -> Optional[int]:
    """TorchX 0.7.0 leaves an Optional[int] of a component as the text that was typed."""
    if typed is None:
        return None
    if not str(typed).lstrip("-").isdecimal() or int(typed) < least:
        raise LaunchError(f"--{flag} {typed}: give a whole number from {least} on, or leave it out")
    return int(typed)


def named_host(name: str) -> Host:
    if name in NAMED_HOSTS:
        return NAMED_HOSTS[name]
    from torchx import specs  # its own names, and those of other packages' entry points; costs an import

    try:
        found = specs.named_resources[name]
    except KeyError:
        known = ", ".join(NAMED_HOSTS)
        raise LaunchError(
            f"-h {name} is no named resource{did_you_mean(name, NAMED_HOSTS)}; there are {known} and TorchX's own; "
            "or give --cpu, --gpu and --memMB"
        ) from None
    return Host(max(found.cpu, 0), max(found.gpu, 0), max(found.memMB, 0))


def this_host() -> Host:
    """The cores that this process may use and the memory of this machine; no GPU."""
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return Host(len(os.sched_getaffinity(0)), 0, memory_mb)


def parse_shape(j: str) -> tuple[int, int]:
    """'2x8' -> 2 nodes of 8 ranks; '8' -> 1 node. Raises LaunchError, for 2:4x8 too: see parse_elastic_shape()."""
    least, nodes, ranks = parse_elastic_shape(j)
    if least != nodes:
        raise LaunchError(f"-j {j}: only train goes on with fewer nodes and with more; give -j {nodes}x{ranks}")
    return nodes, ranks


def parse_elastic_shape(j: str) -> tuple[int, int, int]:
    """'2:4x8' -> at least 2 nodes, at most 4, of 8 ranks each; '4x8' -> 4, 4, 8. Raises LaunchError."""
    match = re.fullmatch(r"(?:(?:(\d+):)?(\d+)x)?(\d+)", j)
    nodes, ranks = (int(match[2] or 1), int(match[3])) if match else (0, 0)
    least = int(match[1] or nodes) if match else 0
    if not 1 <= least <= nodes or ranks < 1:
        raise LaunchError(
            f"-j {j} is not NODESxRANKS_PER_NODE, nor LEAST:MOSTxRANKS_PER_NODE, all at least 1; for instance -j 1x2, -j 2x8 or -j 2:4x8"
        )
    return least, nodes, ranks


def threads_per_rank(cpu: int, ranks_per_node: int) -> int:
    """OMP_NUM_THREADS: the host's cores shared evenly, for torch would otherwise start one a core in every rank."""
    return max(1, cpu // ranks_per_node)


def with_hardware(words: list[str], where: Where) -> list[str]:
    """The overrides with the preset that --h or --gpu 0 stands for, if they choose none."""
    gpus = asked_host(where.cpu, where.gpu, where.memMB, where.h).gpu
    preset = "cpu" if gpus == 0 else PRESETS.get(where.h or "")
    chosen = any(word.lstrip("+").startswith("hardware=") for word in words)
    return [f"hardware={preset}", *words] if preset and not chosen else words


def on_hardware(workload: Workload, where: Where, hardware: HardwareConfig) -> Workload:
    """Raises LaunchError if the ranks of a host do not fit its cards, or the preset is for other cards than the host's."""
    ranks, card = workload.ranks_per_node, PRESETS.get(where.h or "")
    on_gpus = hardware.compute_device == "cuda"
    if on_gpus and card and hardware.name in {*PRESETS.values()} - {card}:
        raise LaunchError(
            f"--h {where.h} is a host of {card} cards, and the job's hardware is {hardware.name}: "
            f"give hardware={card}, or another host"
        )
    if on_gpus and hardware.ranks_per_host and ranks > hardware.ranks_per_host:
        raise LaunchError(
            f"-j {workload.shape} starts {ranks} ranks on a host, and a host of {hardware.name} has "
            f"{hardware.ranks_per_host} GPUs: give -j with at most {hardware.ranks_per_host}, or hardware.ranks_per_host"
        )
    if workload.gpu and hardware.compute_device != "cpu":
        _check_ranks(workload, workload.gpu)
    return replace(workload, device=hardware.compute_device, hardware=hardware.name)


def _check_ranks(workload: Workload, gpus: int) -> None:
    ranks = workload.ranks_per_node
    if ranks > gpus:
        raise LaunchError(
            f"-j {workload.shape} starts {ranks} ranks on a host of {gpus} GPU(s), and each rank takes one: "
            f"-j {-(-workload.nodes * ranks // gpus)}x{gpus}, or {ranks} GPUs a node (--gpu {ranks})"
        )


def on_cluster(workload: Workload, gpus: Optional[int] = None) -> Workload:
    """The workload with the GPUs that a scheduler must be asked for. `gpus`: of a node, by the scheduler's own options.

    Raises LaunchError if nothing says on which hardware several ranks run, or if it does not fit them.
    """
    ranks, gpu = workload.ranks_per_node, workload.gpu if gpus is None else gpus
    if gpu is None and workload.device == "cuda":
        gpu = ranks
    if gpu is None and workload.device == "auto" and workload.nodes * ranks > 1:
        raise LaunchError(
            f"-j {workload.shape} starts {workload.nodes * ranks} ranks, and nothing says on which hardware: give --gpu {ranks} "
            "(one GPU a rank), --h HOST (h100_80gb_x8, ...) or hardware=PRESET; for ranks on CPUs --gpu 0"
        )
    if workload.gpu is not None and gpu != workload.gpu:
        raise LaunchError(
            f"--gpu {workload.gpu}, and the scheduler's own options ask for {gpu} GPU(s) a node: leave one out"
        )
    if workload.device == "cpu" and gpu:
        raise LaunchError(
            f"{gpu} GPU(s) a node are asked for, and the job's hardware, {workload.hardware}, has none: leave them out (--gpu 0), or give hardware=PRESET"
        )
    if workload.device == "cuda" and not gpu:
        raise LaunchError(
            f"the job's hardware, {workload.hardware}, has GPUs, and none is asked for: give --gpu {ranks}, or hardware=cpu"
        )
    if gpu and workload.device:
        _check_ranks(workload, gpu)
    if workload.device and workload.cpu and workload.cpu < ranks:
        raise LaunchError(
            f"--cpu {workload.cpu} is less than a core for each of the {ranks} ranks of a node: give --cpu {ranks * CORES_A_RANK}"
        )
    return replace(workload, gpu=gpu)
