"""Convert a searcher's result into a PlanRecord: the ranks' loads, and each table's choice with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.types import ShardingPlan

from pipeline.embeddings.limits import sharding_types_exact_for
from pipeline.planner.cost_model import CACHED_KERNELS, KEY_VALUE, UVM_KERNELS, cache_load_factor
from pipeline.planner.plan_record import Objective, PlanRecord, RankLoad, TableChoice, critical_path_ms
from pipeline.planner.request import PlacedTable, Problem, fingerprint_of, state_bytes, table_bytes
from pipeline.planner.search.problem import Floats
from pipeline.planner.searcher import PHASES
from pipeline.runtime.byte_counts import show_bytes


@dataclass(frozen=True)
class ChosenPlan:
    """Hold a plan as options whose shards are assigned to ranks. Bound and gap are set if they are proven."""

    plan: ShardingPlan
    options: list[ShardingOption]
    minimised: str
    lower_bound_ms: float | None = None
    gap: float | None = None
    torchrec: Objective | None = None


def build_record(planner: str, problem: Problem, found: ChosenPlan) -> PlanRecord:
    request = problem.request
    by_name = {option.name: option for option in found.options}
    ranks = rank_loads(found.options, request.hardware.world_size, problem.costs.links.latencies_ms())
    slowest = max(load.cost_ms for load in ranks)
    return PlanRecord(
        planner=planner,
        hardware=request.hardware.name,
        plan=found.plan,
        tables=[_choice(entry, by_name[entry.table.name], problem) for entry in problem.placed],
        ranks=ranks,
        objective=Objective(found.minimised, slowest, critical_path_ms(ranks), found.lower_bound_ms, found.gap),
        torchrec_objective=found.torchrec,
        usable_hbm_bytes=problem.usable[0],
        usable_ddr_bytes=problem.usable[1],
        usable_ssd_bytes=request.hardware.ssd_cap_bytes,
        dense_bytes=problem.dense_bytes,
        fingerprint=fingerprint_of(problem),
    )


def rank_loads(options: list[ShardingOption], world_size: int, latencies_ms: Mapping[str, Floats]) -> list[RankLoad]:
    """Sum the loads of the shards on each rank. The latency of all collectives is added to every rank."""
    shards: list[list[Shard]] = [[] for _ in range(world_size)]
    for option in options:
        for shard in option.shards:
            assert shard.rank is not None  # TorchRec validates it
            shards[shard.rank].append(shard)
    kinds = sorted({option.sharding_type for option in options} & latencies_ms.keys())
    waits = dict(zip(PHASES, sum((latencies_ms[kind] for kind in kinds), np.zeros(len(PHASES))).tolist(), strict=True))
    return [
        RankLoad(
            rank=rank,
            hbm_bytes=sum(shard.storage.hbm for shard in local if shard.storage),
            ddr_bytes=sum(shard.storage.ddr for shard in local if shard.storage),
            ssd_bytes=sum(shard.storage.ssd for shard in local if shard.storage),
            **{
                phase: waits[phase] + float(sum(getattr(shard.perf, torchrec_phase) for shard in local))
                for phase, torchrec_phase in PHASES.items()
            },
        )
        for rank, local in enumerate(shards)
    ]


def _choice(entry: PlacedTable, option: ShardingOption, problem: Problem) -> TableChoice:
    table, storage = entry.table, option.total_storage
    return TableChoice(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        weight_bytes=table.num_embeddings * table.embedding_dim * entry.parameter.element_size(),
        state_bytes=state_bytes(table, problem.request.optimizer.name),
        hbm_bytes=storage.hbm,
        ddr_bytes=storage.ddr,
        ssd_bytes=storage.ssd,
        sharding_type=option.sharding_type,
        compute_kernel=option.compute_kernel,
        ranks=[shard.rank for shard in option.shards if shard.rank is not None],
        cost_ms=float(option.total_perf),
        reason=_reason(entry, option, problem),
        cache_load_factor=cache_load_factor(option) if option.compute_kernel in CACHED_KERNELS else None,
        tiers=problem.costs.tier_forecast(option),
    )


def _reason(entry: PlacedTable, option: ShardingOption, problem: Problem) -> str:
    """Return why the table has this sharding type, and a note if the type is inexact."""
    optimizer, world_size = problem.request.optimizer.name, problem.request.hardware.world_size
    size, room = table_bytes(entry, optimizer), max(problem.usable[:1] if problem.usable[0] else problem.usable)
    if len(problem.constraints[entry.table.name].sharding_types or []) == 1 and entry.table.sharding.sharding_types:
        why = f"tables.{entry.table.config_name}.sharding allows nothing else"
    elif world_size == 1:
        why = "there is one rank"
    elif option.sharding_type == "data_parallel":
        why = "small: a copy on every rank saves the all-to-all"
    elif option.sharding_type == "table_wise":
        why = "fits one rank, cheapest unsharded"
    elif size > room:
        why = f"{show_bytes(size)} does not fit one rank's {show_bytes(room)}"
    elif len(held_by := {shard.rank for shard in option.shards}) == 1:
        why = f"fits one rank; {option.sharding_type} as other tables, whose collectives it shares"
    else:
        why = f"spreads {show_bytes(size)} and its lookups over {len(held_by)} ranks"
    if option.compute_kernel in (*UVM_KERNELS, *CACHED_KERNELS):
        where = "on SSD" if option.compute_kernel == KEY_VALUE else "in host memory"
        why += f"; {where}, " + (
            "as its compute_kernels say"
            if entry.table.sharding.compute_kernels
            else "because HBM does not hold all tables"
        )
    if option.compute_kernel in CACHED_KERNELS:
        known = problem.costs.knows_frequencies(entry.table.name)
        why += (
            f"; a cache of {100 * cache_load_factor(option):g} % of its rows serves {100 * problem.costs.hit_rate(option):.0f} % "
            f"of lookups{'' if known else ', assumed even, because there are no frequencies'}"
        )
    if (tiers := problem.costs.tier_forecast(option)) is not None:
        known = problem.costs.knows_frequencies(entry.table.name)
        why += (
            f"; {tiers.slots:,} of its {entry.table.num_embeddings:,} rows in memory, which serve {100 * tiers.hit_rate:.0f} % of "
            f"lookups{'' if known else ', assumed even'}; other rows are on SSD: "
            f"{tiers.rows_a_step:,.0f} rows per step are loaded and evicted "
            f"({show_bytes(tiers.read_bytes)} read)"
        )
    if option.sharding_type not in sharding_types_exact_for(optimizer) and option.num_shards > 1:
        why += f"; {optimizer} has a state per column shard, unlike the unsharded optimizer"
    if entry.table.note:
        why += f"; {entry.table.note}"
    return why
