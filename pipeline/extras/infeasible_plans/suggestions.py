"""Suggest changes to a request that no plan can hold, each with its config lines."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipeline.embeddings.table import Table
from pipeline.planner.cost_model import UVM_KERNELS
from pipeline.planner.request import PlacedTable, PlanRequest, TableOptimizer, table_bytes

NUM_NAMED = 3  # tables whose config lines are written out


@dataclass(frozen=True)
class Suggestion:
    """Hold a suggestion. `lines`: overrides for the command line. `fraction`: planner.reserved_memory_fraction."""

    lines: str
    request: PlanRequest
    fraction: float


def working_suggestions(
    request: PlanRequest,
    placed: list[PlacedTable],
    usable: tuple[int, int],
    fraction: float,
    free_bytes: Callable[[Suggestion], int | None],
    others: Sequence[Suggestion] = (),
) -> list[tuple[Suggestion, int]]:
    """Find the smallest change of each kind that works: first `others`, then the cheapest kinds.

    free_bytes: returns the free memory of the fullest rank for the changed request, or None without
    a plan.
    """
    unchanged = Suggestion("", request, fraction)
    working = []
    for changes in [iter(others), *_changes(unchanged, placed, usable)]:
        for suggestion in changes:
            free = free_bytes(suggestion)
            if free is not None:
                working.append((suggestion, free))
                break
    return working


def _changes(
    unchanged: Suggestion, placed: list[PlacedTable], usable: tuple[int, int]
) -> Iterator[Iterator[Suggestion]]:
    """Yield kinds of changes. Each kind is a series of larger and larger changes."""
    optimizer = unchanged.request.optimizer.name
    by_size = [entry.table for entry in sorted(placed, key=lambda entry: -table_bytes(entry, optimizer))]
    if unchanged.request.hardware.world_size > 1:
        unsplit = [table for table in by_size if _lacks_row_wise(table)]
        yield _relaxed_limits(
            unchanged, unsplit, "sharding_types", lambda table: [*table.sharding.sharding_types, "row_wise"]
        )
    if "fused_uvm_caching" in unchanged.request.hardware.device.table_kernels:
        unspilled = [table for table in by_size if _lacks_host_memory(table)]
        yield _relaxed_limits(unchanged, unspilled, "compute_kernels", lambda table: ["fused_uvm_caching"])
    rowwise = replace(
        unchanged,
        lines="optimizer.sparse.name=rowwise_adagrad",
        request=replace(
            unchanged.request, optimizer=TableOptimizer("rowwise_adagrad", unchanged.request.optimizer.weight_decay)
        ),
    )
    half = replace(unchanged, lines="tables.default.data_type=fp16", request=_in_fp16(unchanged.request, placed))
    if optimizer != "rowwise_adagrad":
        yield iter([rowwise])
    if any(table.data_type == "fp32" for table in by_size):
        yield iter([half])
        if optimizer != "rowwise_adagrad":
            both = replace(half.request, optimizer=rowwise.request.optimizer)
            yield iter([replace(half, lines=f"{rowwise.lines} {half.lines}", request=both)])
    yield _more_hosts(unchanged, sum(table_bytes(entry, optimizer) for entry in placed), usable)
    if unchanged.fraction > 0.05:
        yield iter([replace(unchanged, lines="planner.reserved_memory_fraction=0.05", fraction=0.05)])


def _lacks_row_wise(table: Table) -> bool:
    types = table.sharding.sharding_types
    return bool(types) and "row_wise" not in types and table.sharding.compute_kernels != ["dense"]


def _lacks_host_memory(table: Table) -> bool:
    kernels = table.sharding.compute_kernels
    return bool(kernels) and kernels != ["dense"] and not set(kernels) & set(UVM_KERNELS)


def _relaxed_limits(
    unchanged: Suggestion, tables: list[Table], key: str, allowed: Callable[[Table], list[str]]
) -> Iterator[Suggestion]:
    """Yield changes that remove a limit of the largest table, of the two largest, of the four largest ..."""
    count = 1
    while tables and count < 2 * len(tables):
        relaxed = tables[:count]
        # Parts of one compressed table have one line in the config.
        values = {table.config_name: allowed(table) for table in relaxed}
        lines = [f"'tables.{name}.sharding.{key}=[{','.join(value)}]'" for name, value in values.items()]
        more = f" and the same for {len(lines) - NUM_NAMED} more: {', '.join(list(values)[NUM_NAMED:])}"
        changed = [_allowing(table, key, values.get(table.config_name)) for table in unchanged.request.tables]
        text = " ".join(lines[:NUM_NAMED]) + (more if lines[NUM_NAMED:] else "")
        yield replace(unchanged, lines=text, request=replace(unchanged.request, tables=changed))
        count *= 2


def _allowing(table: Table, key: str, value: list[str] | None) -> Table:
    if value is None:
        return table
    sharding = table.sharding
    changed = (
        replace(sharding, sharding_types=value) if key == "sharding_types" else replace(sharding, compute_kernels=value)
    )
    return replace(table, sharding=changed)


def _in_fp16(request: PlanRequest, placed: list[PlacedTable]) -> PlanRequest:
    model = copy.deepcopy(request.model)
    for entry in placed:
        bag = model.get_submodule(entry.module).get_submodule(f"embedding_bags.{entry.table.name}")
        bag.weight = nn.Parameter(torch.empty_like(entry.parameter, dtype=torch.float16, device="meta"))
    tables = [replace(table, data_type="fp16") for table in request.tables]
    return replace(request, model=model, tables=tables)


def _more_hosts(unchanged: Suggestion, total_bytes: int, usable: tuple[int, int]) -> Iterator[Suggestion]:
    hardware = unchanged.request.hardware
    local = hardware.local_world_size
    least = max(hardware.num_hosts + 1, math.ceil(total_bytes / max(1, max(usable)) / local))
    for hosts in dict.fromkeys([least, least + 1, *(math.ceil(least * factor) for factor in (1.5, 2.0))]):
        larger = replace(hardware, world_size=hosts * local)
        yield replace(
            unchanged, lines=f"world_size={hosts * local}", request=replace(unchanged.request, hardware=larger)
        )
