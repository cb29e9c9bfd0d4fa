"""Describe a plan, fingerprint what it is made for, and read plan files as plain values.

This module does not import torch, so that showing and comparing plan files is fast. plan_codec.py
turns files into TorchRec's objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.runtime.errors import PlanError
from pipeline.runtime.storage import storage

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

Fingerprint = dict[str, Any]  # JSON values, see request.fingerprint_of
# In the order of a step.
PHASES = ("input_dist_ms", "forward_compute_ms", "forward_comms_ms", "backward_compute_ms", "backward_comms_ms")


SECTOR_BYTES = 512


@dataclass(frozen=True)
class TierForecast:
    """Describe a table with tiers in a steady state, with the number of distinct rows that a step reads."""

    slots: int
    hit_rate: float
    rows_a_step: float

    @property
    def read_bytes(self) -> float:
        """Return the bytes that a step reads from the SSD: at least one sector for each row."""
        return SECTOR_BYTES * self.rows_a_step


@dataclass(frozen=True)
class TableChoice:
    """Describe how one table is sharded. Byte counts and `cost_ms` are sums over the table's shards
    and include input and output buffers.

    cache_load_factor: the share of rows that a cache in HBM holds; None without a cache.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    weight_bytes: int  # one copy of the table
    state_bytes: int  # optimizer state of that copy
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    sharding_type: str
    compute_kernel: str
    ranks: list[int]
    cost_ms: float
    reason: str
    cache_load_factor: float | None = None
    tiers: TierForecast | None = None  # of a table with most rows on an SSD

    @property
    def share_in_memory(self) -> float:
        """Return the share of the table's rows that are in memory."""
        return 1.0 if self.tiers is None else self.tiers.slots / self.num_embeddings


@dataclass(frozen=True)
class RankLoad:
    """Hold memory and estimated time of a rank's tables. The latency of all collectives is added to every rank."""

    rank: int
    hbm_bytes: int
    ddr_bytes: int
    ssd_bytes: int
    input_dist_ms: float
    forward_compute_ms: float
    forward_comms_ms: float
    backward_compute_ms: float
    backward_comms_ms: float

    @property
    def cost_ms(self) -> float:
        return float(sum(getattr(self, phase) for phase in PHASES))


@dataclass(frozen=True)
class Objective:
    """max_rank is the total cost of the slowest rank, which TorchRec minimizes. critical_path is
    the sum over phases of the slowest rank's cost. `lower_bound_ms` and `gap` are for `minimised`,
    and None if nothing is proven.
    """

    minimised: str
    max_rank_ms: float
    critical_path_ms: float
    lower_bound_ms: float | None = None
    gap: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanDescription:
    """Describe a plan without its ShardingPlan.

    usable_*_bytes: a rank's memory for tables. dense_bytes: memory that the layers need on each
    rank in training. torchrec_objective: the objective of TorchRec's plan for the same request, if
    TorchRec's planner was called.
    """

    planner: str
    hardware: str
    tables: list[TableChoice]
    ranks: list[RankLoad]
    objective: Objective
    usable_hbm_bytes: int
    usable_ddr_bytes: int
    usable_ssd_bytes: int
    dense_bytes: int
    fingerprint: Fingerprint
    torchrec_objective: Objective | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRecord(PlanDescription):
    """Hold a plan with its description: the content of a plan file."""

    plan: ShardingPlan


def critical_path_ms(ranks: list[RankLoad]) -> float:
    """Return the milliseconds of the critical path: at the end of each phase all ranks wait for the slowest one."""
    return sum(max(getattr(load, phase) for load in ranks) for phase in PHASES)


FOLDER = "sharding_plans"
OF_THIS_MACHINE = ".autox"  # part of the name of a plan for hardware=auto; no shipped plan has it
PACKAGE = Path(__file__).resolve().parents[1]
FORMAT_VERSION = 2
COMMAND = "python -m pipeline plan experiment=<name> hardware=<preset> world_size=<ranks>"
# What decoding a damaged file raises: torch gives ValueErrors for shards, RuntimeErrors for devices.
DAMAGE = (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RuntimeError)


def find_plan_file(path: str, command: str) -> str:
    """Search `path`, then the plans of this package. Raises PlanError, which shows `command` to make a plan."""
    if storage.is_file(path):
        return path
    looked = [path]
    # paths.root may have moved the folder
    _, in_folder, name = f"/{path}".rpartition(f"/{FOLDER}/")
    may_ship = OF_THIS_MACHINE not in path and (in_folder or not (path.startswith("/") or "://" in path))
    if may_ship:
        looked.append(str(shipped_folder() / (name if in_folder else path)))
        if storage.is_file(looked[-1]):
            return looked[-1]
    raise PlanError(f"no plan file at {' or '.join(looked)}; make one: {command}")


def shipped_folder() -> Path:
    """Return sharding_plans/ of the checkout, or of the installed package if there is no checkout."""
    return (PACKAGE.parent if (PACKAGE.parent / "setup.cfg").is_file() else PACKAGE) / FOLDER


@dataclass(frozen=True)
class PlanView:
    """Hold a plan for display. `shardings`: module path -> table -> its ParameterSharding as in the file."""

    description: PlanDescription
    shardings: dict[str, dict[str, dict[str, Any]]]


def read_view(path: str) -> PlanView:
    """Read the plan in `path` for display, without checking its shards. Raises PlanError."""
    path = find_plan_file(path, COMMAND)
    content = read_content(path)
    try:
        view = PlanView(PlanDescription(**description_fields(content)), content["plan"])
        planned = {table for tables in view.shardings.values() for table in tables}
        if planned != {choice.name for choice in view.description.tables}:
            raise PlanError("its plan and its tables differ")
    except DAMAGE as error:
        raise PlanError(f"plan file {path} is damaged: {str(error)[:500]}; make it again: {COMMAND}") from error
    return view


def read_content(path: str, command: str = COMMAND) -> dict[str, Any]:
    """Return the file's JSON object. Raises PlanError if its format is not supported or it is not a plan."""
    try:
        content: dict[str, Any] = json.loads(storage.read_text(path))
        version = content["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"{path} is not a plan file ({repr(error)[:500]}); make one: {command}") from None
    if version != FORMAT_VERSION:
        raise PlanError(
            f"plan file {path} has format_version {str(version)[:100]}, this release reads {FORMAT_VERSION}; make it again: {command}"
        )
    return content


def description_fields(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a PlanDescription. Raises an exception of DAMAGE if the file is damaged."""
    if sha256_of(content["fingerprint"]) != content["fingerprint_sha256"]:
        raise PlanError("its fingerprint was changed by hand")
    description = msgspec.convert(content, PlanDescription)  # a ValidationError is a ValueError
    return {field.name: getattr(description, field.name) for field in fields(PlanDescription)}


def to_json(value: Any, indent: int = 0) -> str:
    """Format JSON with one line for each shard, table and rank."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(item, dict) or (isinstance(item, list) and _is_nested(item)) for item in items):
        return json.dumps(value)
    pad, end = "\n" + " " * (indent + 1), "\n" + " " * indent
    if isinstance(value, dict):
        inner = f",{pad}".join(f"{json.dumps(key)}: {to_json(item, indent + 1)}" for key, item in value.items())
        return f"{{{pad}{inner}{end}}}"
    return f"[{pad}{f',{pad}'.join(to_json(item, indent + 1) for item in value)}{end}]"


def _is_nested(value: list[Any]) -> bool:
    return any(isinstance(item, (dict, list)) for item in value)


# One of each line's packages is installed. The CUDA and the CPU build have different names.
LIBRARIES = {"torch": ("torch",), "torchrec": ("torchrec",), "fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu")}
MAX_LINES = 8


def describe_hosts(topology: dict[str, Any]) -> str:
    """Return how many ranks share a host and, if NVLink connects hosts, a domain, from a fingerprint's topology."""
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


def sha256_of(fingerprint: Fingerprint) -> str:
    text = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))  # floats exactly
    return hashlib.sha256(text.encode()).hexdigest()


def differing_lines(
    plan: Fingerprint, job: Fingerprint, names: tuple[str, str] = ("the plan", "this job")
) -> list[str]:
    """Return a line `key: value in the plan, value in this job` for each difference except library versions."""
    in_plan, in_job = dict(_flatten(plan)), dict(_flatten(job))
    return [
        f"{key}: {_show(in_plan, key)} in {names[0]}, {_show(in_job, key)} in {names[1]}"
        for key in sorted(in_plan.keys() | in_job.keys())
        if not key.startswith("libraries.") and _show(in_plan, key) != _show(in_job, key)
    ]


def differing_libraries(plan: Fingerprint, job: Fingerprint) -> list[str]:
    """Return the versions that differ, such as `torch 2.11.0 (here 2.14.1)`.

    Other versions do not make a plan wrong: a ShardingPlan means the same in TorchRec 1.6 to 1.9.
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
