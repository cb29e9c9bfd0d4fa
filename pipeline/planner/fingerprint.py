"""Fingerprint what a plan is made for, as exact text, and list the lines in which two fingerprints
differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from pipeline.planner.plan_record import Fingerprint

if TYPE_CHECKING:  # both import torch, which comparing fingerprints does not need
    from pipeline.planner.constraints import PlacedTable, TableOptimizer
    from pipeline.planner.hardware import Hardware

# One of each line's packages is installed. The CUDA and the CPU build have different names.
LIBRARIES = {"torch": ("torch",), "torchrec": ("torchrec",), "fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu")}
MAX_LINES = 8


def take_fingerprint(
    placed: list[PlacedTable],
    hardware: Hardware,
    optimizer: TableOptimizer,
    batch_size: int,
    comms: dict[str, dict[str, str]],
) -> Fingerprint:
    """Return JSON values: topology, tables, optimizer, precision on the wire, batch size per rank
    and library versions.
    """
    topology = asdict(hardware)
    for label in ("name", "tflops_fp32", "tflops_bf16", "issue_us"):  # no plan depends on them
        del topology[label]
    if hardware.hosts_per_nvlink_domain == 1:  # plans of earlier releases lack it
        del topology["hosts_per_nvlink_domain"]
    return {
        "topology": topology,
        "tables": {entry.table.name: _describe_table(entry) for entry in placed},
        "sparse_optimizer": asdict(optimizer),
        "comms": comms,
        "batch_size": batch_size,
        "libraries": library_versions(),
    }


def _describe_table(entry: PlacedTable) -> dict[str, Any]:
    """Describe a table without frequencies, because a plan without the data, or with last week's,
    is still valid.

    Parts of compressed tables are ordinary tables.
    """
    described = asdict(entry.table)
    for left_out in (
        "name",
        "init",
        "frequencies",
        "compression",
        "max_ids",
        "part_of",
        "rows_of",
        "managed",
        "note",
        "l2",
        "positions",
        "padding",
    ):
        del described[left_out]
    for absent, is_default in (("is_weighted", not entry.table.is_weighted), ("tiers", entry.table.tiers is None)):
        if is_default:  # plans of earlier releases lack it
            del described[absent]
    return {**described, "module": entry.module}


def describe_hosts(topology: dict[str, Any]) -> str:
    """Return how many ranks of a fingerprint's topology share a host and, if NVLink joins hosts, a domain."""
    joined, hosts = topology["local_world_size"], topology.get("hosts_per_nvlink_domain", 1)
    return f"{joined // hosts} per host" + (f", {hosts} hosts per NVLink domain" if hosts > 1 else "")


def library_versions() -> dict[str, str]:
    return {name: next(_installed(packages), "none") for name, packages in LIBRARIES.items()}


def _installed(packages: tuple[str, ...]) -> Iterator[str]:
    for package in packages:
        try:
            yield metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def canonical_text(fingerprint: Fingerprint) -> str:
    """Return equal bytes only for equal values: floats are written so that they are read back
    exactly.
    """
    return json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))


def sha256_of(fingerprint: Fingerprint) -> str:
    return hashlib.sha256(canonical_text(fingerprint).encode()).hexdigest()


def differing_lines(
    plan: Fingerprint, job: Fingerprint, names: tuple[str, str] = ("the plan", "this job")
) -> list[str]:
    """Return `key: value in the plan, value in this job` for every value that differs, except for
    library versions.
    """
    in_plan, in_job = dict(_flatten(plan)), dict(_flatten(job))
    return [
        f"{key}: {_show(in_plan, key)} in {names[0]}, {_show(in_job, key)} in {names[1]}"
        for key in sorted(in_plan.keys() | in_job.keys())
        if not key.startswith("libraries.") and _show(in_plan, key) != _show(in_job, key)
    ]


def differing_libraries(plan: Fingerprint, job: Fingerprint) -> list[str]:
    """Return `torch 2.11.0 (here 2.14.1)` for every version that differs.

    Other versions do not make a plan wrong: a ShardingPlan means the same in TorchRec 1.6 to 1.9,
    and a plan for a cluster is made on a laptop with other builds. A new search may find another
    plan, though.
    """
    versions = job["libraries"]
    return [
        f"{name} {version} (here {versions[name]})"
        for name, version in plan["libraries"].items()
        if version != versions[name]
    ]


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _flatten(child, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _show(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "nothing"
