"""Search over TorchRec's sharding options as arrays, and assign the shards of the chosen options to ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torchrec.distributed.planner.types import ParameterConstraints, Shard, ShardingOption
from torchrec.distributed.types import CacheParams

from pipeline.config.registry import from_extra
from pipeline.embeddings.limits import COLUMN_SHARDING_TYPES, allowed_sharding_types
from pipeline.planner.cost_model import KEY_VALUE
from pipeline.planner.estimator import CostedEnumerator
from pipeline.planner.hardware import Hardware, build_topology
from pipeline.planner.request import COLUMN_STEP, PlacedTable, Problem, TableOptimizer, table_bytes
from pipeline.planner.search.incumbent import SearchConfig, WorkClock
from pipeline.planner.search.portfolio import SearchResult, search
from pipeline.planner.search.problem import Assignment, Floats, Option, Rule, SearchProblem
from pipeline.runtime.logs import get_logger

PlanPrice = Callable[[list[ShardingOption]], float]
logger = get_logger(__name__)
CACHE_LOAD_FACTORS = (0.02, 0.05, 0.1, 0.4)  # in addition to FBGEMM's default of 0.2
MIN_CACHED_SHARE = 0.01  # of a rank's HBM; a smaller table's cache is not worth a choice
MIN_COLUMN_WIDTH = 32  # narrower rows waste a cache line of HBM
RULES = {
    "data_parallel": Rule.EVERY_RANK,
    "row_wise": Rule.EVERY_RANK,
    "table_wise": Rule.ANY_RANK,
    "column_wise": Rule.ANY_RANK,
    "table_row_wise": Rule.ONE_HOST,
    "table_column_wise": Rule.WITHIN_HOST,
    "grid_shard": Rule.WHOLE_HOSTS,
}
CACHED = "fused_uvm_caching"
PHASES = {  # phase -> its name in TorchRec
    "input_dist_ms": "input_dist_comms",
    "forward_compute_ms": "fwd_compute",
    "forward_comms_ms": "fwd_comms",
    "backward_compute_ms": "bwd_compute",
    "backward_comms_ms": "bwd_comms",
}


def enumerate_options(problem: Problem) -> tuple[list[ShardingOption], int]:
    """Return TorchRec's options, then options with more widths and caches; and the number of TorchRec's options."""
    request, constraints, placed = problem.request, problem.constraints, problem.placed
    module, sharders, hardware, optimizer = request.model, request.sharders, request.hardware, request.optimizer
    topology = build_topology(hardware)

    def enumerator_of(constraints: dict[str, ParameterConstraints]) -> CostedEnumerator:
        return CostedEnumerator(topology, request.batch_size, constraints, optimizer.name, problem.costs)

    enumerator = enumerator_of(constraints)
    options = enumerator.enumerate(module, sharders)
    num_proposed = len(options)
    widths = {entry.table.name: _column_widths(entry, constraints[entry.table.name]) for entry in placed}
    kinds = {entry.table.name: _column_kinds(entry, hardware, optimizer) for entry in placed}
    for width in sorted({width for of_table in widths.values() for width in of_table}, reverse=True):
        wanted = {name for name, of_table in widths.items() if width in of_table and kinds[name]}
        narrower = {
            # The enumerator needs an option for every table; those of others are dropped.
            name: replace(given, sharding_types=kinds[name], min_partition=width)
            if name in wanted
            else replace(given, sharding_types=(given.sharding_types or [])[:1])
            for name, given in constraints.items()
        }
        if wanted:
            others = enumerator_of(narrower).enumerate(module, sharders)
            options += [option for option in others if option.name in wanted]
    cached = _with_caches(options, placed, hardware, optimizer)
    return options + enumerator.estimate_again(cached), num_proposed


def _with_caches(
    options: list[ShardingOption], placed: list[PlacedTable], hardware: Hardware, optimizer: TableOptimizer
) -> list[ShardingOption]:
    """Return options with caches of CACHE_LOAD_FACTORS, or none if all tables fit in HBM."""
    sizes = {entry.table.name: table_bytes(entry, optimizer.name) for entry in placed}
    asked = {entry.table.name for entry in placed if CACHED in entry.table.sharding.compute_kernels}
    if not asked and sum(sizes.values()) < hardware.world_size * hardware.hbm_cap_bytes / 2:
        return []
    large = {name for name, size in sizes.items() if size > MIN_CACHED_SHARE * hardware.hbm_cap_bytes}
    resized = []
    for option in options:
        if option.compute_kernel == CACHED and option.name in asked | large:
            for load_factor in CACHE_LOAD_FACTORS:
                other = copy.copy(option)
                other.cache_params = CacheParams(load_factor=load_factor)
                other.shards = [Shard(size=shard.size, offset=shard.offset) for shard in option.shards]
                resized.append(other)
    return resized


def _column_widths(entry: PlacedTable, constraints: ParameterConstraints) -> list[int]:
    """Return the table's width divided by 2, 4, ...; nothing if the config sets the width."""
    dim, widths = entry.table.embedding_dim, []
    if constraints.min_partition is None:
        while dim % 2 == 0 and dim // 2 >= MIN_COLUMN_WIDTH and (dim // 2) % COLUMN_STEP == 0:
            dim //= 2
            widths.append(dim)
    return widths


def _column_kinds(entry: PlacedTable, hardware: Hardware, optimizer: TableOptimizer) -> list[str]:
    if hardware.world_size == 1:
        return []
    useful = {"column_wise"} | ({"table_column_wise"} if hardware.num_hosts > 1 else set())
    named = set(entry.table.sharding.sharding_types)
    offered = set(entry.sharder.sharding_types(hardware.compute_device))
    allowed = set(allowed_sharding_types(entry.table, optimizer.name)) & set(COLUMN_SHARDING_TYPES)
    if entry.table.sharding.compute_kernels == ["dense"]:
        return []
    return sorted(allowed & offered & (named or useful))


def search_options(
    options: list[ShardingOption],
    num_proposed: int,
    hardware: Hardware,
    usable: tuple[int, int],
    config: SearchConfig,
    latency_ms: dict[str, Floats],
    price: PlanPrice | None = None,
) -> tuple[list[ShardingOption], SearchResult]:
    """Return one option per table with ranks assigned to its shards, as TorchRec's partitioner
    does.

    price: returns the cost of a complete plan. If given, it refines the result for as long as the
    search took. Raises Infeasible if no plan fits.
    """
    problem, by_table = build_search_problem(options, num_proposed, hardware, usable, latency_ms)
    tables = [[options[index] for index in indices] for indices in by_table.values()]
    result = search(problem, config)
    if price is None:
        return _with_ranks(tables, result.assignment), result
    clock = WorkClock(config.seconds)
    refine = from_extra("refine_plan", "planner.objective=step_time")
    refined = refine(problem, [result.assignment], lambda found: price(_with_ranks(tables, found)), clock.has_used)
    logger.info(
        "search: a predicted step of %.4g ms by critical_path, %.4g ms after %d predictions",
        refined.start,
        refined.price,
        refined.priced,
    )
    return _with_ranks(tables, refined.assignment), result


def build_search_problem(
    options: list[ShardingOption],
    num_proposed: int,
    hardware: Hardware,
    usable: tuple[int, int],
    latency_ms: dict[str, Floats],
) -> tuple[SearchProblem, dict[str, list[int]]]:
    """Return the problem as arrays, and a map from fully qualified names to the indexes of their options."""
    by_table: dict[str, list[int]] = {}
    for index, option in enumerate(options):
        by_table.setdefault(option.fqn, []).append(index)
    problem = SearchProblem(
        tables=[
            [to_arrays(options[index], index < num_proposed) for index in indices] for indices in by_table.values()
        ],
        capacity=np.tile(np.array(usable, dtype=float), (hardware.world_size, 1)),
        ranks_per_host=hardware.local_world_size,
        host_memory=np.full(hardware.num_hosts, float(usable[1] * hardware.local_world_size)),
        latency_ms=latency_ms,
    )
    return problem, by_table


def to_arrays(option: ShardingOption, proposed: bool = True) -> Option:
    """Convert an option to arrays. `proposed`: TorchRec's planner has this option too."""
    cost = [[getattr(shard.perf, phase) for phase in PHASES.values()] for shard in option.shards]
    memory = [[shard.storage.hbm, shard.storage.ddr] for shard in option.shards if shard.storage]
    return Option(
        rule=RULES[option.sharding_type],
        cost_ms=np.array(cost, dtype=float),
        memory=np.array(memory, dtype=float),
        kind=option.sharding_type,
        proposed=proposed,
        distinct_ranks=option.compute_kernel == KEY_VALUE,
    )


def _with_ranks(tables: list[list[ShardingOption]], assignment: Assignment) -> list[ShardingOption]:
    chosen = []
    for options, choice, ranks in zip(tables, assignment.choices, assignment.ranks, strict=True):
        option = copy.copy(options[choice])
        option.shards = [copy.copy(shard) for shard in option.shards]
        for shard, rank in zip(option.shards, ranks.tolist(), strict=True):
            shard.rank = rank
        chosen.append(option)
    return chosen
