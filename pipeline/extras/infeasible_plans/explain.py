"""Explain why no plan holds the tables: what is missing, in GiB, and suggestions as config
lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from pipeline.config.planner import PlannerConfig
from pipeline.extras.infeasible_plans.shortfall import Shortfall, least_shortfall
from pipeline.extras.infeasible_plans.suggestions import Suggestion, working_suggestions
from pipeline.planner.chosen_plan import rank_loads
from pipeline.planner.cost_model import UVM_KERNELS
from pipeline.planner.hardware import Hardware
from pipeline.planner.request import PlacedTable, Problem, build_problem, table_bytes
from pipeline.planner.search.incumbent import Infeasible, SearchConfig
from pipeline.planner.searcher import build_search_problem, enumerate_options, search_options
from pipeline.runtime.byte_counts import show_bytes

NUM_LARGEST = 5
NUM_RANKS = 3
SPLITTING_TYPES = ("row_wise", "table_row_wise", "column_wise", "table_column_wise", "grid_shard")

# Find whether there is a plan at all, and little else.
FIRST_PLAN = SearchConfig(
    objective="max_rank", proposal_placements=20_000, start_steps=0, local_steps=(), anneal_moves=0,
    exact_variables=3000, exact_work=100_000,
)  # fmt: skip


def explain_infeasible(config: PlannerConfig, problem: Problem) -> Iterator[str]:
    """Yield the lines that explain why no plan holds the tables."""
    request, fraction = problem.request, config.reserved_memory_fraction
    hardware, optimizer_name = request.hardware, request.optimizer.name
    sizes = {entry.table.name: table_bytes(entry, optimizer_name) for entry in problem.placed}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:NUM_LARGEST]
    yield "largest: " + ", ".join(f"{name} {show_bytes(sizes[name])}" for name in largest)
    yield (
        f"per rank: {_capacity(hardware, problem.usable)} ({100 * fraction:g} % is reserved, and "
        "the dense part needs its share)"
    )
    if hardware.world_size > 1:
        yield from islice(_unsplittable(problem, sizes), NUM_LARGEST)
    yield from _describe_missing(problem)
    until = time.monotonic() + config.timeout_s

    def free_bytes(suggestion: Suggestion) -> int | None:
        return None if time.monotonic() > until else _free_bytes(config, suggestion)

    others = () if config.kind == "search" else (Suggestion("planner=search", request, fraction),)
    working = (
        working_suggestions(request, problem.placed, problem.usable, fraction, free_bytes, others)
        if request.suggests
        else []
    )
    yield "suggestions, each tried:" if working else "none of the tried changes is sufficient alone"
    for suggestion, free in working:
        yield f"  {suggestion.lines}: fits, {show_bytes(free)} free on the fullest rank"
    yield "not tried:"
    for line in _untried(problem.placed, sizes, hardware.world_size * sum(problem.usable)):
        yield f"  {line}"


def _describe_missing(problem: Problem) -> list[str]:
    """Describe the ranks that the best attempt overfills. Return nothing if a table has no option at all."""
    try:
        options, num_proposed = enumerate_options(problem)
    except RuntimeError:
        return []
    search_problem, by_table = build_search_problem(options, num_proposed, problem.request.hardware, problem.usable, {})
    shortfall = least_shortfall(search_problem)
    chosen = [options[numbers[choice]] for numbers, choice in zip(by_table.values(), shortfall.choices, strict=True)]
    taken = [int(option.total_storage.hbm + option.total_storage.ddr) for option in chosen]
    return describe_shortfall(
        shortfall, [option.name for option in chosen], [option.sharding_type for option in chosen], taken
    )


def _free_bytes(config: PlannerConfig, suggestion: Suggestion) -> int | None:
    """Return the free bytes of the fullest rank under the first plan for a changed request."""
    try:
        problem = build_problem(replace(config, reserved_memory_fraction=suggestion.fraction), suggestion.request)
        options, num_proposed = enumerate_options(problem)
        settings = replace(FIRST_PLAN, seconds=config.timeout_s)
        chosen, _ = search_options(options, num_proposed, suggestion.request.hardware, problem.usable, settings, {})
    except (Infeasible, RuntimeError, ValueError):
        return None
    loads = rank_loads(chosen, suggestion.request.hardware.world_size, problem.costs.links.latencies_ms())
    hbm, ddr = problem.usable
    return min((hbm - load.hbm_bytes) if hbm > 0 else (ddr - load.ddr_bytes) for load in loads)


def _capacity(hardware: Hardware, usable: tuple[int, int]) -> str:
    host = f"{show_bytes(usable[1])} of {show_bytes(hardware.ddr_cap_bytes)} host memory"
    return (
        f"{show_bytes(usable[0])} of {show_bytes(hardware.hbm_cap_bytes)} HBM, {host}"
        if hardware.hbm_cap_bytes
        else host
    )


def _room(entry: PlacedTable, problem: Problem) -> int:
    """Return a rank's bytes for a shard. On a GPU rank, host memory counts if the table may be there."""
    hbm, ddr = problem.usable
    if hbm <= 0:
        return ddr
    uvm = set(UVM_KERNELS) & set(problem.constraints[entry.table.name].compute_kernels or ())
    return max(hbm, ddr) if uvm else hbm


def _unsplittable(problem: Problem, sizes: dict[str, int]) -> Iterator[str]:
    for entry in problem.placed:
        name, room = entry.table.name, _room(entry, problem)
        types = problem.constraints[name].sharding_types or []
        if sizes[name] > room and not set(types) & set(SPLITTING_TYPES):
            yield (
                f"table {name} may only be {' or '.join(types)}, so one rank needs "
                f"{show_bytes(sizes[name])} but has "
                f"{show_bytes(room)}: add row_wise to tables.{entry.table.config_name}.sharding.sharding_types"
            )


def describe_shortfall(shortfall: Shortfall, names: list[str], kinds: list[str], taken: list[int]) -> list[str]:
    """Say which ranks the best attempt overfills. kinds, taken: sharding types and bytes of the tables."""
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
