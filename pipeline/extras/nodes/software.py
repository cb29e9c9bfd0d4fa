"""Describe a node: name, cores, memory, versions and GPUs."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow", "torchrec-pipeline")
GPU_FIELDS = {  # field of nvidia-smi --query-gpu -> key in NodeFacts.gpus
    "index": "index", "name": "name", "driver_version": "driver", "memory.total": "memory_mib", "memory.used": "used_mib",
    "ecc.errors.uncorrected.volatile.total": "ecc_errors", "temperature.gpu": "celsius",
    "clocks_event_reasons.hw_slowdown": "slowdown",
}  # fmt: skip
HOT_CELSIUS = 90


@dataclass(frozen=True)
class NodeFacts:
    host: str
    cores: int
    memory_gib: float
    versions: dict[str, str]
    gpus: list[dict[str, str]] = field(default_factory=list)
    gpu_error: str = ""


def node_facts() -> NodeFacts:
    """Describe this node."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    cores, memory_gib = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    try:
        query = f"--query-gpu={','.join(GPU_FIELDS)}"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return NodeFacts(socket.gethostname(), cores, memory_gib, found)
    except (OSError, subprocess.TimeoutExpired) as error:
        return NodeFacts(socket.gethostname(), cores, memory_gib, found, [], f"nvidia-smi: {error}")
    problem = (done.stdout + done.stderr).strip().splitlines()[-1] if done.returncode else ""
    gpus = [] if problem else parse_gpus(done.stdout)
    return NodeFacts(socket.gethostname(), cores, memory_gib, found, gpus, problem)


def parse_gpus(text: str) -> list[dict[str, str]]:
    """Read the lines of nvidia-smi --query-gpu=GPU_FIELDS --format=csv,noheader,nounits."""
    lines = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(GPU_FIELDS.values(), values, strict=True)) for values in lines]


def gpu_problems(facts: NodeFacts) -> list[str]:
    """Return what would slow down or end a run on the GPUs of this node."""
    found = [facts.gpu_error] if facts.gpu_error else []
    for gpu in facts.gpus:
        name = f"GPU {gpu['index']} ({gpu['name']})"
        if gpu["ecc_errors"].isdigit() and int(gpu["ecc_errors"]):
            errors = f"{gpu['ecc_errors']} uncorrected memory error(s)"
            found.append(f"{name}: {errors}; reset it, or drain the node")
        if gpu["celsius"].isdigit() and int(gpu["celsius"]) >= HOT_CELSIUS:
            found.append(f"{name}: {gpu['celsius']} degrees Celsius; it slows down above about {HOT_CELSIUS}")
        if gpu["slowdown"] == "Active":
            reason = "slowed down by its hardware (heat or power)"
            found.append(f"{name}: {reason}; see nvidia-smi -q -d PERFORMANCE")
    return found
