"""Explain why no plan holds the tables: what is missing, in GiB, and suggestions as config
lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from torchrec.distributed.planner.types import ParameterConstraints

from pipeline.planner.estimator import shard_state_bytes
from pipeline.planner.hardware import Hardware
from pipeline.planner.request import PlacedTable
from pipeline.planner.search.shortfall import Shortfall
from pipeline.runtime.byte_counts import show_bytes

NUM_LARGEST = 5
NUM_RANKS = 3
SPLITTING_TYPES = ("row_wise", "table_row_wise", "column_wise", "table_column_wise", "grid_shard")
UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")


def explain_infeasible(
    placed: list[PlacedTable],
    constraints: dict[str, ParameterConstraints],
    hardware: Hardware,
    optimizer_name: str,
    usable: tuple[int, int],
    reserved_fraction: float,
    missing: Sequence[str] = (),
    working: Sequence[tuple[str, int]] = (),
) -> str:
    """Return the explanation. usable: HBM and host memory per rank for tables.

    missing: where the best attempt exceeds capacities. working: config lines that were tried, with
    the free bytes of the fullest rank.
    """
    sizes = {entry.table.name: table_bytes(entry, optimizer_name) for entry in placed}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:NUM_LARGEST]
    lines = [
        f"no plan holds the {len(placed)} tables: with their {optimizer_name} state they need "
        f"{show_bytes(sum(sizes.values()))}, but {hardware.world_size} rank(s) of {hardware.name} "
        f"have {show_bytes(hardware.world_size * sum(usable))} for them",
        "largest: " + ", ".join(f"{name} {show_bytes(sizes[name])}" for name in largest),
        f"per rank: {_capacity(hardware, usable)} ({100 * reserved_fraction:g} % is reserved, and "
        "the dense part needs its share)",
        *(islice(_unsplittable(placed, constraints, sizes, usable), NUM_LARGEST) if hardware.world_size > 1 else ()),
        *missing,
        "suggestions, each tried:" if working else "none of the tried changes is sufficient alone",
        *(f"  {lines}: fits, {show_bytes(free)} free on the fullest rank" for lines, free in working),
        "not tried:",
        *(f"  {suggestion}" for suggestion in _untried(placed, sizes, hardware.world_size * sum(usable))),
    ]
    return "\n".join(lines)


def table_bytes(entry: PlacedTable, optimizer_name: str, bytes_per_number: int | None = None) -> int:
    """Return the bytes of one copy of a table and its optimizer state."""
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
    """Return a rank's bytes for a shard. On a GPU host memory counts if the table may be there."""
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
                f"table {name} may only be {' or '.join(types)}, so one rank needs "
                f"{show_bytes(sizes[name])} but has "
                f"{show_bytes(room)}: add row_wise to tables.{entry.table.config_name}.sharding.sharding_types"
            )


def describe_shortfall(shortfall: Shortfall, names: list[str], kinds: list[str], taken: list[int]) -> list[str]:
    """Say which ranks the best attempt overfills. kinds, taken: types and bytes of tables."""
    memories = ("HBM", "host memory", "SSD")
    lines = []
    ranks = np.argsort(-shortfall.over.sum(axis=1), kind="stable")
    full = [int(rank) for rank in ranks if shortfall.over[rank].any()]
    for rank in full[:NUM_RANKS]:
        over = ", ".join(
            f"{show_bytes(float(more))} of {memory}"
            for memory, more in zip(memories, shortfall.over[rank], strict=False)
            if more
        )
        there = sorted(shortfall.tables_on(rank), key=lambda table: -taken[table])[:NUM_LARGEST]
        held = ", ".join(f"{names[table]} ({kinds[table]})" for table in there)
        lines.append(f"best attempt: rank {rank} lacks {over} for {held}")
    if len(full) > NUM_RANKS:
        total = show_bytes(float(shortfall.over.sum()))
        lines.append(f"best attempt: {len(full)} of {len(shortfall.over)} ranks are overfull, by {total} in all")
    for host in np.flatnonzero(shortfall.host_over.any(axis=1)).tolist():
        lines.append(f"best attempt: host {host} lacks {show_bytes(float(shortfall.host_over[host].sum()))}")
    return lines


def _untried(placed: list[PlacedTable], sizes: dict[str, int], room: int) -> Iterator[str]:
    largest = max((entry.table for entry in placed), key=lambda table: sizes[table.name])
    yield f"fewer rows: tables.{largest.config_name} has {largest.num_embeddings:,}; data.ids.min_frequency or max_size drops rare ids"
    if sum(sizes.values()) <= room:
        yield "a longer planner.timeout_s if little is missing"
