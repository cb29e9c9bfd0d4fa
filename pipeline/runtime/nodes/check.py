"""Run all checks of a job's nodes, and tell what they found."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from pipeline.runtime.nodes.clocks import clock_offsets
from pipeline.runtime.nodes.facts import NodeFacts, gpu_problems, node_facts
from pipeline.runtime.nodes.links import Link, measure_all_to_all, measure_links
from pipeline.runtime.nodes.shared_folder import REPLACES, FolderFacts, check_folder
from pipeline.runtime.process.distributed import DistributedContext

SLOW_LINK = 0.5  # of the median
SHOWN_NODES = 16  # of a larger matrix the slowest links are listed
GB = 1e9


@dataclass(frozen=True)
class Limits:
    """min_gb_per_s: of every link; 0: none is known. max_clock_skew_s: between any two nodes."""

    min_gb_per_s: float = 0.0
    max_clock_skew_s: float = 1.0


@dataclass
class NodesReport:
    """nodes: by the lowest rank of each. clocks: seconds ahead of the first node's, and the bound of that estimate."""

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
    """Collective: the same report on all ranks. `folder`: a shared one; empty: none is checked."""
    gathered: list[Any] = [None] * context.world_size
    dist.all_gather_object(gathered, node_facts())
    first_of: dict[str, int] = {}
    for rank, facts in enumerate(gathered):
        first_of.setdefault(_place(facts.host, rank, context), rank)
    members = list(first_of.values())
    num_bytes = int(megabytes * 1e6)
    report = NodesReport(
        context.world_size, context.backend, megabytes, {rank: gathered[rank] for rank in members},
        measure_links(context, members, num_bytes), measure_all_to_all(context, num_bytes), clock_offsets(context, members),
    )  # fmt: skip
    if folder:
        report.folder = check_folder(context, folder)
    report.problems = find_problems(report, limits)
    return report


def _place(host: str, rank: int, context: DistributedContext) -> str:
    """One of each node. Agents that share a host, as where a cluster is tried on one machine, count as nodes of their own."""
    return f"{host}/{rank // context.local_world_size}"


def find_problems(report: NodesReport, limits: Limits) -> list[str]:
    """What would end, slow down or spoil a run, each with what to do."""
    return [
        *_version_problems(report),
        *(f"{report.nodes[rank].host}: {each}" for rank in report.nodes for each in gpu_problems(report.nodes[rank])),
        *_gpu_count_problems(report),
        *_link_problems(report, limits),
        *_clock_problems(report, limits),
        *(report.folder.problems if report.folder else []),
    ]


def _version_problems(report: NodesReport) -> list[str]:
    found = []
    packages = sorted({package for facts in report.nodes.values() for package in facts.versions})
    for package in packages:
        by_version: dict[str, list[str]] = {}
        for facts in report.nodes.values():
            by_version.setdefault(facts.versions.get(package, "missing"), []).append(facts.host)
        if len(by_version) > 1:
            seen = "; ".join(f"{version} on {_some(hosts)}" for version, hosts in sorted(by_version.items()))
            found.append(f"{package} differs: {seen}; start all nodes from one image or environment")
    return found


def _gpu_count_problems(report: NodesReport) -> list[str]:
    counts = {len(facts.gpus) for facts in report.nodes.values()}
    if len(counts) == 1:
        return []
    most = max(counts)
    short = [facts.host for facts in report.nodes.values() if len(facts.gpus) < most]
    return [f"{_some(short)}: fewer GPUs than the {most} of other nodes; drain it, or ask for nodes of one kind"]


def _link_problems(report: NodesReport, limits: Limits) -> list[str]:
    if not report.links:
        return []
    median = statistics.median(link.bytes_per_s for link in report.links)
    floor = max(SLOW_LINK * median if len(report.links) > 2 else 0.0, limits.min_gb_per_s * GB)
    slow = sorted((link for link in report.links if link.bytes_per_s < floor), key=lambda link: link.bytes_per_s)
    if not slow:
        return []
    named = ", ".join(f"{_names(report, link)} {link.bytes_per_s / GB:.2f}" for link in slow[:4])
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    return [
        f"{len(slow)} of {len(report.links)} links are under {floor / GB:.2f} GB/s (median {median / GB:.2f}): {named}{more}; "
        "the slowest link sets every step's pace: leave out a node that is in most of them"
    ]


def _clock_problems(report: NodesReport, limits: Limits) -> list[str]:
    if not report.clocks:
        return []
    ahead = {rank: offset for rank, (offset, _) in report.clocks.items()}
    early, late = min(ahead, key=ahead.__getitem__), max(ahead, key=ahead.__getitem__)
    skew = ahead[late] - ahead[early]
    if skew <= limits.max_clock_skew_s:
        return []
    return [
        f"the clock of {report.nodes[late].host} is {skew:.2f} s ahead of {report.nodes[early].host}'s, more than "
        f"{limits.max_clock_skew_s:g} s: logs and events cannot be put in order; start chrony or ntpd there"
    ]


def _some(names: list[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _names(report: NodesReport, link: Link) -> str:
    return f"{report.nodes[link.source].host} -> {report.nodes[link.target].host}"


def describe(report: NodesReport) -> str:
    """For a person: the matrix of links, one line a measure, and the problems."""
    lines = [f"{len(report.nodes)} node(s), {report.world_size} rank(s), {report.backend}"]
    for rank, facts in report.nodes.items():
        gpus = f", {len(facts.gpus)} x {facts.gpus[0]['name']}" if facts.gpus else ", no GPU"
        offset, bound = report.clocks[rank]
        clock = f", clock {offset * 1e3:+.2f} ms (within {bound * 1e3:.2f})" if rank else ""
        lines.append(f"  rank {rank}: {facts.host}, {facts.cores} cores, {facts.memory_gib:.0f} GiB{gpus}{clock}")
    lines += _describe_links(report)
    if report.world_size > 1:
        speed = report.all_to_all_bytes_per_s / GB
        lines.append(f"all-to-all of {report.megabytes:g} MB a rank: {speed:.2f} GB/s sent by each rank")
    if report.folder:
        facts_of = report.folder
        lines.append(
            f"shared folder: a renamed file is seen after {facts_of.visible_after_s * 1e3:.0f} ms, {facts_of.replaces_seen} of "
            f"{REPLACES} replacements were seen by a reader, locks {facts_of.locks}, writes {facts_of.write_bytes_per_s / GB:.2f} GB/s "
            f"with fsync, {facts_of.free_bytes / 2**30:.0f} GiB free"
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
        ordered = sorted(speeds.items(), key=lambda item: item[1])
        median = statistics.median(speeds.values())
        slowest = [f"  rank {a} -> {b}: {speed:.2f}" for (a, b), speed in ordered[:8]]
        return [f"{title}: median {median:.2f}, the slowest:", *slowest]
    header = "  from \\ to " + "".join(f"{rank:>8}" for rank in report.nodes)
    rows = [
        f"  {source:>9} " + "".join(f"{speeds[source, target]:>8.2f}" if source != target else f"{'-':>8}" for target in report.nodes)
        for source in report.nodes
    ]  # fmt: skip
    return [f"{title}:", header, *rows]
