"""Suggest changed requests where no plan holds the tables, each with the config lines that ask for it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.embeddings.table import Table
from pipeline.planner.constraints import PlacedTable, TableOptimizer
from pipeline.planner.infeasible import UVM_KERNELS, table_bytes

if TYPE_CHECKING:
    from pipeline.planner.planner import PlanRequest

NUM_NAMED = 3  # tables whose config lines are written out


@dataclass(frozen=True)
class WayOut:
    """`lines`: overrides for the command line. `fraction`: planner.reserved_memory_fraction."""

    lines: str
    request: PlanRequest
    fraction: float


def working_ways(
    request: PlanRequest,
    placed: list[PlacedTable],
    usable: tuple[int, int],
    fraction: float,
    room_left: Callable[[WayOut], int | None],
    others: Sequence[WayOut] = (),
) -> list[tuple[WayOut, int]]:
    """Of each kind of change the smallest that works, those that cost least first, with the bytes a rank has left then.

    `others` are tried first. `room_left`: what the fullest rank has left on a plan for the changed request, None where there is no plan.
    """
    here = WayOut("", request, fraction)
    found = []
    for changes in [iter(others), *_changes(here, placed, usable)]:
        for way in changes:
            left = room_left(way)
            if left is not None:
                found.append((way, left))
                break
    return found


def _changes(here: WayOut, placed: list[PlacedTable], usable: tuple[int, int]) -> Iterator[Iterator[WayOut]]:
    """Kinds of changes, each as ever larger ones."""
    optimizer = here.request.optimizer.name
    by_size = [entry.table for entry in sorted(placed, key=lambda entry: -table_bytes(entry, optimizer))]
    if here.request.hardware.world_size > 1:
        unsplit = [table for table in by_size if _lacks_row_wise(table)]
        yield _limits_lifted(
            here, unsplit, "sharding_types", lambda table: [*table.sharding.sharding_types, "row_wise"]
        )
    if here.request.hardware.compute_device == "cuda":
        unspilled = [table for table in by_size if _lacks_host_memory(table)]
        yield _limits_lifted(here, unspilled, "compute_kernels", lambda table: ["fused_uvm_caching"])
    rowwise = replace(
        here, lines="optimizer.sparse.name=rowwise_adagrad",
        request=replace(here.request, optimizer=TableOptimizer("rowwise_adagrad", here.request.optimizer.weight_decay)),
    )  # fmt: skip
    half = replace(here, lines="tables.default.data_type=fp16", request=_in_fp16(here.request, placed))
    if optimizer != "rowwise_adagrad":
        yield iter([rowwise])
    if any(table.data_type == "fp32" for table in by_size):
        yield iter([half])
        if optimizer != "rowwise_adagrad":
            both = replace(half.request, optimizer=rowwise.request.optimizer)
            yield iter([replace(half, lines=f"{rowwise.lines} {half.lines}", request=both)])
    yield _more_hosts(here, sum(table_bytes(entry, optimizer) for entry in placed), usable)
    if here.fraction > 0.05:
        yield iter([replace(here, lines="planner.reserved_memory_fraction=0.05", fraction=0.05)])


def _lacks_row_wise(table: Table) -> bool:
    types = table.sharding.sharding_types
    return bool(types) and "row_wise" not in types and table.sharding.compute_kernels != ["dense"]


def _lacks_host_memory(table: Table) -> bool:
    kernels = table.sharding.compute_kernels
    return bool(kernels) and kernels != ["dense"] and not set(kernels) & set(UVM_KERNELS)


def _limits_lifted(
    here: WayOut, tables: list[Table], key: str, allowed: Callable[[Table], list[str]]
) -> Iterator[WayOut]:
    """For the largest table, the two largest, four ..."""
    count = 1
    while tables and count < 2 * len(tables):
        mine = tables[:count]
        # Parts of one compressed table have one line in the config.
        values = {table.config_name: allowed(table) for table in mine}
        lines = [f"'tables.{name}.sharding.{key}=[{','.join(value)}]'" for name, value in values.items()]
        more = f" and so for {len(lines) - NUM_NAMED} more: {', '.join(list(values)[NUM_NAMED:])}"
        changed = [_allowing(table, key, values.get(table.config_name)) for table in here.request.tables]
        text = " ".join(lines[:NUM_NAMED]) + (more if lines[NUM_NAMED:] else "")
        yield replace(here, lines=text, request=replace(here.request, tables=changed))
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
    """The same on meta with tables of half the size."""
    model = copy.deepcopy(request.model)
    for entry in placed:
        bag = model.get_submodule(entry.module).get_submodule(f"embedding_bags.{entry.table.name}")
        bag.weight = nn.Parameter(torch.empty_like(entry.parameter, dtype=torch.float16, device="meta"))
    tables = [replace(table, data_type="fp16") for table in request.tables]
    return replace(request, model=model, tables=tables)


def _more_hosts(here: WayOut, total_bytes: int, usable: tuple[int, int]) -> Iterator[WayOut]:
    """From what the sum alone asks for."""
    hardware = here.request.hardware
    local = hardware.local_world_size
    least = max(hardware.num_hosts + 1, math.ceil(total_bytes / max(1, max(usable)) / local))
    for hosts in dict.fromkeys([least, least + 1, *(math.ceil(least * factor) for factor in (1.5, 2.0))]):
        larger = replace(hardware, world_size=hosts * local)
        yield replace(here, lines=f"world_size={hosts * local}", request=replace(here.request, hardware=larger))
