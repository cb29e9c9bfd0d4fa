"""Turn tables that no plan can hold into what is missing, in GiB, and the ways out as config lines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from torchrec.distributed.planner.types import ParameterConstraints

from pipeline.embeddings.config import Table
from pipeline.planner.constraints import PlacedTable
from pipeline.planner.estimator import shard_state_bytes
from pipeline.planner.hardware import Hardware
from pipeline.planner.record import show_bytes

NUM_LARGEST = 5
SPLITTING_TYPES = ("row_wise", "table_row_wise", "column_wise", "table_column_wise", "grid_shard")
UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")


def explain_infeasible(
    placed: list[PlacedTable],
    constraints: dict[str, ParameterConstraints],
    hardware: Hardware,
    optimizer_name: str,
    usable: tuple[int, int],
    reserved_fraction: float,
) -> str:
    """`usable` is HBM and host memory a rank that tables may take; see estimator.usable_bytes."""
    sizes = {entry.table.name: table_bytes(entry, optimizer_name) for entry in placed}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:NUM_LARGEST]
    lines = [
        f"no plan holds the {len(placed)} tables: with their {optimizer_name} state they take {show_bytes(sum(sizes.values()))}, "
        f"{hardware.world_size} rank(s) of {hardware.name} have {show_bytes(hardware.world_size * sum(usable))} for them",
        "largest: " + ", ".join(f"{name} {show_bytes(sizes[name])}" for name in largest),
        f"a rank: {_capacity(hardware, usable)} ({100 * reserved_fraction:g} % kept free, and the dense part's share)",
        *(islice(_unsplittable(placed, constraints, sizes, usable), NUM_LARGEST) if hardware.world_size > 1 else ()),
        "ways out:",
        *(f"  {way}" for way in _ways_out(placed, hardware, optimizer_name, sizes, usable)),
    ]
    return "\n".join(lines)


def table_bytes(entry: PlacedTable, optimizer_name: str, bytes_per_number: int | None = None) -> int:
    """One copy of a table and its optimizer state."""
    table = entry.table
    size = bytes_per_number or entry.parameter.element_size()
    weights = table.num_embeddings * table.embedding_dim * size
    return weights + shard_state_bytes(optimizer_name, table.num_embeddings, table.embedding_dim)


def _capacity(hardware: Hardware, usable: tuple[int, int]) -> str:
    host = f"{show_bytes(usable[1])} of {show_bytes(hardware.ddr_cap_bytes)} host memory"
    return (
        f"{show_bytes(usable[0])} of {show_bytes(hardware.hbm_cap_bytes)} HBM, {host}"
        if hardware.hbm_cap_bytes
        else host
    )


def _room(entry: PlacedTable, constraints: dict[str, ParameterConstraints], usable: tuple[int, int]) -> int:
    """What one rank has for one shard of a table: host memory counts where it is a GPU's table that may lie there."""
    hbm, ddr = usable
    if hbm <= 0:
        return ddr
    uvm = set(UVM_KERNELS) & set(constraints[entry.table.name].compute_kernels or ())
    return max(hbm, ddr) if uvm else hbm


def _unsplittable(
    placed: list[PlacedTable],
    constraints: dict[str, ParameterConstraints],
    sizes: dict[str, int],
    usable: tuple[int, int],
) -> Iterator[str]:
    for entry in placed:
        name, room = entry.table.name, _room(entry, constraints, usable)
        types = constraints[name].sharding_types or []
        if sizes[name] > room and not set(types) & set(SPLITTING_TYPES):
            yield (
                f"table {name} may only be {' or '.join(types)}, so one rank must hold {show_bytes(sizes[name])} and has "
                f"{show_bytes(room)}: add row_wise to tables.{name}.sharding.sharding_types"
            )


def _ways_out(
    placed: list[PlacedTable], hardware: Hardware, optimizer_name: str, sizes: dict[str, int], usable: tuple[int, int]
) -> Iterator[str]:
    total, a_rank = sum(sizes.values()), max(1, sum(usable))
    if total > hardware.world_size * a_rank:
        hosts = math.ceil(total / a_rank / hardware.local_world_size)
        yield f"world_size={hosts * hardware.local_world_size} at least"
    rowwise = sum(table_bytes(entry, "rowwise_adagrad") for entry in placed)
    if rowwise < total:
        yield f"optimizer.sparse.name=rowwise_adagrad: {show_bytes(rowwise)} in all"
    half = sum(table_bytes(entry, optimizer_name, bytes_per_number=2) for entry in placed)
    if half < total:
        yield f"tables.default.data_type=fp16: {show_bytes(half)} in all"
    largest = max((entry.table for entry in placed), key=lambda table: sizes[table.name])
    yield f"fewer rows: tables.{largest.name} has {largest.num_embeddings:,}; data.ids.min_frequency or max_size drops rare ones"
    if limited := [entry.table.name for entry in placed if _is_limited(entry.table)]:
        yield f"fewer limits: tables.{limited[0]}.sharding" + (f" and {len(limited) - 1} more" if limited[1:] else "")
    yield "a lower planner.reserved_memory_fraction, or a longer planner.timeout_s where little is missing"


def _is_limited(table: Table) -> bool:
    return bool(table.sharding.sharding_types or table.sharding.compute_kernels)
