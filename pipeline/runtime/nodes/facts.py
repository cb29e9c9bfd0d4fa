"""What each rank says of its node: name, cores, memory, versions and GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow", "torchrec-pipeline")
GPU_FIELDS = {  # of nvidia-smi --query-gpu -> what it is called here
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
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus, error = _gpus()
    return NodeFacts(socket.gethostname(), len(os.sched_getaffinity(0)), memory / 2**30, found, gpus, error)


def _gpus() -> tuple[list[dict[str, str]], str]:
    """What nvidia-smi says of each GPU, and its error."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi gave no answer: {error}"
    if done.returncode:
        return [], (done.stdout + done.stderr).strip().splitlines()[-1]
    return parse_gpus(done.stdout), ""


def parse_gpus(text: str) -> list[dict[str, str]]:
    """The lines of nvidia-smi --query-gpu=GPU_FIELDS --format=csv,noheader,nounits."""
    lines = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(GPU_FIELDS.values(), values, strict=True)) for values in lines]


def gpu_problems(facts: NodeFacts) -> list[str]:
    """What would slow down or end a run on this node's GPUs."""
    found = [facts.gpu_error] if facts.gpu_error else []
    for gpu in facts.gpus:
        name = f"GPU {gpu['index']} ({gpu['name']})"
        if gpu["ecc_errors"].isdigit() and int(gpu["ecc_errors"]):
            found.append(f"{name}: {gpu['ecc_errors']} uncorrected memory error(s); reset it, or drain the node")
        if gpu["celsius"].isdigit() and int(gpu["celsius"]) >= HOT_CELSIUS:
            found.append(f"{name}: {gpu['celsius']} degrees Celsius; it slows down from about {HOT_CELSIUS} on")
        if gpu["slowdown"] == "Active":
            found.append(f"{name}: slowed down by its hardware (heat or power); see nvidia-smi -q -d PERFORMANCE")
    return found
