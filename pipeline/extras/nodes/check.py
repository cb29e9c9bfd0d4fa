"""Run all checks of a job's nodes, and report the results."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from pipeline.extras.nodes.links import Link, clock_offsets, gather, measure_all_to_all, measure_links
from pipeline.extras.nodes.shared_folder import REPLACES, FolderFacts, check_folder
from pipeline.runtime.process.distributed import DistributedContext

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
    """Return facts about this node: versions, cores, memory and GPUs."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    cores, memory_gib = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    gpus, problem = [], ""
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        problem = (done.stdout + done.stderr).strip().splitlines()[-1] if done.returncode else ""
        gpus = [] if problem else parse_gpus(done.stdout)
    except FileNotFoundError:
        pass  # a node without GPUs
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"nvidia-smi: {error}"
    return NodeFacts(socket.gethostname(), cores, memory_gib, found, gpus, problem)


def parse_gpus(text: str) -> list[dict[str, str]]:
    """Read the lines of nvidia-smi --query-gpu=GPU_FIELDS --format=csv,noheader,nounits."""
    lines = [[value.strip() for value in line.split(",")] for line in text.splitlines() if line.strip()]
    return [dict(zip(GPU_FIELDS.values(), values, strict=True)) for values in lines]


def gpu_problems(facts: NodeFacts) -> list[str]:
    """Return problems of this node's GPUs that would slow down or end a run."""
    found = [facts.gpu_error] if facts.gpu_error else []
    for gpu in facts.gpus:
        name = f"GPU {gpu['index']} ({gpu['name']})"
        errors, celsius = gpu["ecc_errors"], gpu["celsius"]
        if errors.isdigit() and int(errors):
            found.append(f"{name}: {errors} uncorrected memory error(s); reset it, or drain the node")
        if celsius.isdigit() and int(celsius) >= HOT_CELSIUS:
            found.append(f"{name}: {celsius} degrees Celsius; it slows down above about {HOT_CELSIUS}")
        if gpu["slowdown"] == "Active":
            found.append(f"{name}: slowed down by its hardware (heat or power); see nvidia-smi -q -d PERFORMANCE")
    return found


SLOW_LINK = 0.5  # of the median
SHOWN_NODES = 16  # with more nodes, the slowest links are listed instead of the matrix
GB = 1e9


@dataclass(frozen=True)
class Limits:
    """Limits of the checks. min_gb_per_s: of every link; 0 means unknown. max_clock_skew_s: between any two nodes."""

    min_gb_per_s: float = 0.0
    max_clock_skew_s: float = 1.0


@dataclass
class NodesReport:
    """The result of all checks. nodes: sorted by lowest rank. clocks: seconds ahead of node 0, and the error bound."""

    world_size: int
    backend: str
    megabytes: float
    nodes: dict[int, NodeFacts]
    links: list[Link]
    all_to_all_bytes_per_s: float
    clocks: dict[int, tuple[float, float]]
    folder: FolderFacts | None = None
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def check_nodes(context: DistributedContext, folder: str, megabytes: float, limits: Limits) -> NodesReport:
    """Collective: return the same report on all ranks. folder: a shared folder to check; empty: check none."""
    gathered = gather(context, node_facts())
    # Agents that share a host, as when a cluster is simulated on one machine, count as separate
    # nodes.
    places = [f"{facts.host}/{rank // context.local_world_size}" for rank, facts in enumerate(gathered)]
    members = sorted(places.index(place) for place in set(places))
    num_bytes = int(megabytes * 1e6)
    report = NodesReport(
        context.world_size, context.backend, megabytes, {rank: gathered[rank] for rank in members},
        measure_links(context, members, num_bytes), measure_all_to_all(context, num_bytes),
        clock_offsets(context, members), check_folder(context, folder) if folder else None,
    )  # fmt: skip
    report.problems = find_problems(report, limits)
    return report


def find_problems(report: NodesReport, limits: Limits) -> list[str]:
    """Return problems that would end, slow down or corrupt a run. Each problem has its fix."""
    found = []
    for package in sorted({package for facts in report.nodes.values() for package in facts.versions}):
        hosts = defaultdict(list)
        for facts in report.nodes.values():
            hosts[facts.versions.get(package, "missing")].append(facts.host)
        if len(hosts) > 1:
            seen = "; ".join(f"{version} on {_some(hosts[version])}" for version in sorted(hosts))
            found.append(f"{package} differs: {seen}; start all nodes from one image or environment")
    found += [f"{facts.host}: {text}" for facts in report.nodes.values() for text in gpu_problems(facts)]
    most = max(len(facts.gpus) for facts in report.nodes.values())
    if short := [facts.host for facts in report.nodes.values() if len(facts.gpus) < most]:
        found.append(
            f"{_some(short)}: fewer GPUs than the {most} of other nodes; drain it, or request nodes of one kind"
        )
    found += [*_link_problems(report, limits), *_clock_problems(report, limits)]
    return [*found, *(report.folder.problems if report.folder else [])]


def _link_problems(report: NodesReport, limits: Limits) -> list[str]:
    speeds = {link: link.bytes_per_s / GB for link in report.links}
    median = statistics.median(speeds.values()) if speeds else 0.0
    floor = max(SLOW_LINK * median if len(speeds) > 2 else 0.0, limits.min_gb_per_s)
    slow = sorted((link for link in speeds if speeds[link] < floor), key=speeds.__getitem__)
    if not slow:
        return []
    hosts = {rank: facts.host for rank, facts in report.nodes.items()}
    named = _some([f"{hosts[each.source]} -> {hosts[each.target]} {speeds[each]:.2f}" for each in slow])
    return [
        f"{len(slow)} of {len(speeds)} links are under {floor:.2f} GB/s (median {median:.2f}): {named}; "
        "the slowest link limits every step: exclude a node that is in most of these links"
    ]


def _clock_problems(report: NodesReport, limits: Limits) -> list[str]:
    ahead = {report.nodes[rank].host: offset for rank, (offset, _) in report.clocks.items()}
    early, late = min(ahead, key=ahead.__getitem__), max(ahead, key=ahead.__getitem__)
    skew = ahead[late] - ahead[early]
    if skew <= limits.max_clock_skew_s:
        return []
    return [
        f"the clock of {late} is {skew:.2f} s ahead of the clock of {early}, more than {limits.max_clock_skew_s:g} s: "
        "logs and events cannot be sorted; start chrony or ntpd there"
    ]


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def describe(report: NodesReport) -> str:
    """Return the report as text: the matrix of links, one line per measurement, and the problems."""
    lines = [f"{len(report.nodes)} node(s), {report.world_size} rank(s), {report.backend}"]
    for rank, facts in report.nodes.items():
        gpus = f", {len(facts.gpus)} x {facts.gpus[0]['name']}" if facts.gpus else ", no GPU"
        offset, bound = report.clocks[rank]
        clock = f", clock {offset * 1e3:+.2f} ms (within {bound * 1e3:.2f})" if rank else ""
        lines.append(f"  rank {rank}: {facts.host}, {facts.cores} cores, {facts.memory_gib:.0f} GiB{gpus}{clock}")
    lines += _describe_links(report)
    if report.world_size > 1:
        speed = report.all_to_all_bytes_per_s / GB
        lines.append(f"all-to-all of {report.megabytes:g} MB per rank: {speed:.2f} GB/s sent by each rank")
    if report.folder:
        found = report.folder
        lines.append(
            f"shared folder: a renamed file is visible after {found.visible_after_s * 1e3:.0f} ms, "
            f"{found.replaces_seen} of {REPLACES} replacements were seen by a reader, writes "
            f"{found.write_bytes_per_s / GB:.2f} GB/s with fsync, {found.free_bytes / 2**30:.0f} GiB free"
        )
    lines += [f"FAIL {problem}" for problem in report.problems]
    return "\n".join(lines if report.problems else [*lines, "all is well"])


def _describe_links(report: NodesReport) -> list[str]:
    if not report.links:
        return ["one node: no link between nodes to measure"]
    speeds = {(link.source, link.target): link.bytes_per_s / GB for link in report.links}
    latencies = [link.latency_s * 1e6 for link in report.links]
    title = f"links, GB/s of {report.megabytes:g} MB messages (latency {min(latencies):.0f} to {max(latencies):.0f} us)"
    if len(report.nodes) > SHOWN_NODES:
        slowest = sorted(speeds, key=speeds.__getitem__)[:8]
        listed = [f"  rank {source} -> {target}: {speeds[source, target]:.2f}" for source, target in slowest]
        return [f"{title}: median {statistics.median(speeds.values()):.2f}, the slowest:", *listed]
    lines = ["  from \\ to " + "".join(f"{rank:>8}" for rank in report.nodes)]
    for source in report.nodes:
        row = (f"{speeds[source, target]:>8.2f}" if source != target else f"{'-':>8}" for target in report.nodes)
        lines.append(f"  {source:>9} " + "".join(row))
    return [f"{title}:", *lines]
