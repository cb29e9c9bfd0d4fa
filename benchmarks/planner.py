"""How good a plan each planner finds, whether it finds one at all, and in how many seconds:

    python -m benchmarks.planner [--suites mlperf_dlrmv2 ...] [--ranks 8 16] [--tightness none 1.2] [--output plans.json]
    python -m benchmarks.planner --all --output plans.json      every suite, topology and tightness: hours

`max_rank` and `critical_path` are ms a step by the estimates that all planners here share; of each row the best is
marked *. `gap` is what the planner itself proves. Each planner runs twice: `hash` is its plan's, `!` where the two
differ. random, size, dim and lookups cut a table by rows where it takes more than half of a rank and place the others
whole, in that order, on the rank that has least of it; their seconds leave out the estimates, which they do not need.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from benchmarks.planner_suites import RANKS, SUITES, TIGHTNESS, build_request, build_suite, reserve
from pipeline.logs import configure_logging, get_logger
from pipeline.planner.collectives import links_of
from pipeline.planner.config import PLANNERS, PlannerConfig
from pipeline.planner.constraints import build_constraints, place_tables
from pipeline.planner.cost_model import CostModel, wire_of
from pipeline.planner.estimator import KeepFree, SortedEnumerator, dense_part_bytes, usable_bytes
from pipeline.planner.fingerprint import library_versions
from pipeline.planner.hardware import Hardware, build_topology
from pipeline.planner.planner import PlanRequest, make_plan, rank_loads
from pipeline.planner.record import critical_path_ms

SMALL_SUITES = ("criteo_kaggle", "mlperf_dlrmv2", "rmc1", "rmc2", "rmc3")
KINDS = tuple(kind for kind in PLANNERS if kind != "file")
LARGE_SHARE = 0.5  # of a rank's memory: a larger table is cut by rows


@dataclass
class Outcome:
    """`gap` and `lower_bound_ms` are of the objective that the planner minimised; None where nothing is proven."""

    suite: str
    ranks: int
    tightness: float | None
    planner: str
    seconds: float = math.nan
    feasible: bool = False
    max_rank_ms: float | None = None
    critical_path_ms: float | None = None
    lower_bound_ms: float | None = None
    gap: float | None = None
    plan_hash: str = ""
    repeatable: bool | None = None
    error: str = ""


@dataclass(frozen=True)
class Found:
    """What a planner made of a request."""

    max_rank_ms: float
    critical_path_ms: float
    plan_hash: str
    seconds: float
    lower_bound_ms: float | None = None
    gap: float | None = None


def by_kind(kind: str, request: PlanRequest, fraction: float, seconds: float) -> Found:
    """One of the planners that `planner.kind` names. Raises ValueError where it finds nothing."""
    config = PlannerConfig(kind=kind, reserved_memory_fraction=fraction, timeout_s=seconds)
    began = time.perf_counter()
    record = make_plan(config, request)
    took = time.perf_counter() - began
    objective = record.objective
    placed = [(choice.name, choice.sharding_type, choice.compute_kernel, choice.ranks) for choice in record.tables]
    return Found(
        objective.max_rank_ms, objective.critical_path_ms, _hash(placed), took, objective.lower_bound_ms, objective.gap
    )


def torchrec_dp(request: PlanRequest, fraction: float, seconds: float) -> Found:
    """TorchRec's planner with its DynamicProgrammingProposer. Raises ValueError where it finds nothing."""
    ready = Ready(request, fraction)
    planner = EmbeddingShardingPlanner(
        topology=ready.topology, batch_size=request.batch_size, enumerator=ready.enumerator(),
        proposer=DynamicProgrammingProposer(), storage_reservation=KeepFree(fraction, ready.dense_bytes),
        constraints=ready.constraints, stats=NoopEmbeddingStats(), debug=False, timeout_seconds=seconds,  # type: ignore[arg-type]
    )  # fmt: skip
    began = time.perf_counter()
    try:
        planner.plan(request.model, request.sharders)
    except (PlannerError, RuntimeError) as error:
        raise ValueError(str(error).strip().splitlines()[0]) from error
    return judge(planner._best_plan or [], request.hardware, time.perf_counter() - began)


class Ready:
    """What TorchRec wants to know of a request, and what tables may take of a rank."""

    def __init__(self, request: PlanRequest, fraction: float) -> None:
        hardware = request.hardware
        self.request = request
        self.placed = place_tables(request.tables, request.model, request.sharders)
        self.constraints = build_constraints(self.placed, hardware, request.optimizer)
        self.topology = build_topology(hardware)
        self.dense_bytes = dense_part_bytes(request.model, [entry.parameter for entry in self.placed])
        device, hbm, ddr = hardware.compute_device, hardware.hbm_cap_bytes, hardware.ddr_cap_bytes
        self.costs = CostModel(hardware, request.tables, wire_of(request.sharders))
        self.usable = usable_bytes(device, hbm, ddr, fraction, self.dense_bytes)[0]

    def enumerator(self) -> SortedEnumerator:
        request = self.request
        return SortedEnumerator(self.topology, request.batch_size, self.constraints, request.optimizer.name, self.costs)

    def options(self, *sharding_types: str) -> dict[tuple[str, str], ShardingOption]:
        """(table, sharding type) -> its option in HBM."""
        for constraint in self.constraints.values():
            constraint.sharding_types, constraint.compute_kernels = list(sharding_types), ["fused"]
        found = self.enumerator().enumerate(self.request.model, self.request.sharders)
        return {(option.name, option.sharding_type): option for option in found}


def greedy(order: str, request: PlanRequest, fraction: float, seed: int = 0) -> Found:
    """Raises ValueError where a table finds no rank with room."""
    ready, world_size = Ready(request, fraction), request.hardware.world_size
    options = ready.options("table_wise", "row_wise")
    weights = _weights(order, request, seed)
    began = time.perf_counter()
    free, load = [float(ready.usable)] * world_size, [0.0] * world_size
    chosen = []
    whole = []
    for table in request.tables:
        if _hbm(options[table.name, "table_wise"])[0] > LARGE_SHARE * ready.usable:
            option = options[table.name, "row_wise"]
            chosen.append(option)
            for rank, (shard, taken) in enumerate(zip(option.shards, _hbm(option), strict=True)):
                shard.rank = rank
                free[rank] -= taken
        else:
            whole.append(table.name)
    generator = random.Random(seed)
    for name in sorted(whole, key=lambda name: (-weights[name], name)):
        option = options[name, "table_wise"]
        (taken,) = _hbm(option)
        fitting = [rank for rank in range(world_size) if free[rank] >= taken]
        if not fitting:
            break
        rank = generator.choice(fitting) if order == "random" else min(fitting, key=lambda rank: (load[rank], rank))
        option.shards[0].rank = rank
        free[rank] -= taken
        load[rank] += weights[name]
        chosen.append(option)
    took = time.perf_counter() - began
    if min(free) < 0:
        raise ValueError("the tables that were cut by rows overfill a rank")
    if left := len(request.tables) - len(chosen):
        raise ValueError(f"{left} of {len(request.tables)} tables found no rank with room")
    return judge(chosen, request.hardware, took)


def _weights(order: str, request: PlanRequest, seed: int) -> dict[str, float]:
    generator = random.Random(seed)
    rules: dict[str, Callable[[int, int, float], float]] = {
        "random": lambda rows, dim, lookups: generator.random(),
        "size": lambda rows, dim, lookups: rows * dim,
        "dim": lambda rows, dim, lookups: dim,
        "lookups": lambda rows, dim, lookups: lookups,
    }
    return {
        table.name: rules[order](table.num_embeddings, table.embedding_dim, sum(table.pooling_factors))
        for table in request.tables
    }


def _hbm(option: ShardingOption) -> list[int]:
    return [shard.storage.hbm for shard in option.shards if shard.storage is not None]


def judge(options: list[ShardingOption], hardware: Hardware, seconds: float) -> Found:
    """Both objectives of placed options, as pipeline.planner counts them."""
    placed = [
        (option.name, option.sharding_type, option.compute_kernel, [shard.rank for shard in option.shards])
        for option in options
    ]
    loads = rank_loads(options, hardware.world_size, links_of(hardware).latencies_ms())
    return Found(max(load.cost_ms for load in loads), critical_path_ms(loads), _hash(placed), seconds)


def _hash(placed: Iterable[tuple[str, str, str, Sequence[int | None]]]) -> str:
    """Of (table, sharding type, kernel, ranks): equal plans have equal hashes, whoever found them."""
    return hashlib.sha256(json.dumps(sorted(placed)).encode()).hexdigest()[:12]


def planners(seconds: float) -> dict[str, Callable[[PlanRequest, float], Found]]:
    found: dict[str, Callable[[PlanRequest, float], Found]] = {}
    for kind in KINDS:
        found[kind] = lambda request, fraction, kind=kind: by_kind(kind, request, fraction, seconds)  # type: ignore[misc]
    found["torchrec_dp"] = lambda request, fraction: torchrec_dp(request, fraction, seconds)
    for order in ("size", "dim", "lookups", "random"):
        found[order] = lambda request, fraction, order=order: greedy(order, request, fraction)  # type: ignore[misc]
    return found


def run_instance(
    suite: str,
    ranks: int,
    tightness: float | None,
    chosen: dict[str, Callable[[PlanRequest, float], Found]],
    repeats: int,
) -> list[Outcome]:
    """Every planner on one suite, topology and tightness; a fresh request each time, for planners write into options."""
    tables = build_suite(suite)
    outcomes = []
    for name, planner in chosen.items():
        outcome = Outcome(suite, ranks, tightness, name)
        began = time.perf_counter()
        try:
            found = [
                planner(build_request(tables, ranks, tightness=tightness), reserve(tightness)) for _ in range(repeats)
            ]
        except ValueError as error:
            outcome.seconds, outcome.error = time.perf_counter() - began, str(error).splitlines()[0]
        else:
            first = found[0]
            outcome.feasible, outcome.seconds = True, statistics.median(each.seconds for each in found)
            outcome.max_rank_ms, outcome.critical_path_ms = first.max_rank_ms, first.critical_path_ms
            outcome.lower_bound_ms, outcome.gap, outcome.plan_hash = first.lower_bound_ms, first.gap, first.plan_hash
            outcome.repeatable = len({each.plan_hash for each in found}) == 1 if repeats > 1 else None
        outcomes.append(outcome)
    return outcomes  # fmt: skip


def show(outcomes: list[Outcome]) -> str:
    """One line a planner; the best of each objective is marked."""
    feasible = [outcome for outcome in outcomes if outcome.feasible]
    best = {
        field: min((getattr(outcome, field) for outcome in feasible), default=math.nan)
        for field in ("max_rank_ms", "critical_path_ms")
    }
    lines = []
    for outcome in outcomes:
        where = f"{outcome.suite:15} {outcome.ranks:4} {outcome.tightness or 'none':>5} {outcome.planner:12}"
        if not outcome.feasible:
            lines.append(f"{where} {'no plan':>33} {outcome.seconds:8.2f} s  {outcome.error[:80]}")
            continue
        values = " ".join(
            f"{getattr(outcome, field):10.4g}{'*' if getattr(outcome, field) <= best[field] * (1 + 1e-9) else ' '}"
            for field in best
        )
        gap = "" if outcome.gap is None else f"{100 * outcome.gap:.2f} %"
        same = "!" if outcome.repeatable is False else ""
        lines.append(f"{where} {values} {gap:>9} {outcome.seconds:8.2f} s  {outcome.plan_hash}{same}")
    return "\n".join(lines)


def summarize(outcomes: list[Outcome]) -> str:
    """Of each planner: the share of instances it solves, of those that any solves, and its mean ratio to the best."""
    instances: dict[tuple[str, int, float | None], list[Outcome]] = {}
    for outcome in outcomes:
        instances.setdefault((outcome.suite, outcome.ranks, outcome.tightness), []).append(outcome)
    solvable = [group for group in instances.values() if any(outcome.feasible for outcome in group)]
    lines = [f"{'planner':12} {'solved':>9} {'max_rank':>10} {'critical_path':>14}   mean ratio to the best of its row"]
    for name in dict.fromkeys(outcome.planner for outcome in outcomes):
        mine = [(outcome, group) for group in solvable for outcome in group if outcome.planner == name]
        solved = [(outcome, group) for outcome, group in mine if outcome.feasible]
        ratios = [_mean_ratio(solved, field) for field in ("max_rank_ms", "critical_path_ms")]
        lines.append(f"{name:12} {f'{len(solved)}/{len(mine)}':>9} {ratios[0]:10.3f} {ratios[1]:14.3f}")
    return "\n".join(lines)


def _mean_ratio(solved: Iterable[tuple[Outcome, list[Outcome]]], field: str) -> float:
    ratios = [
        getattr(outcome, field) / max(1e-12, min(getattr(other, field) for other in group if other.feasible))
        for outcome, group in solved
    ]
    return statistics.fmean(ratios) if ratios else math.nan


def _tightness(text: str) -> float | None:
    return None if text == "none" else float(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    names = list(planners(0.0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=list(SUITES), default=list(SMALL_SUITES), metavar="SUITE")
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=[8])
    parser.add_argument(
        "--tightness", nargs="+", type=_tightness, default=[None, 1.2], help="none, or times the least HBM"
    )
    parser.add_argument("--planners", nargs="+", choices=names, default=names, metavar="PLANNER", help=", ".join(names))
    parser.add_argument("--seconds", type=float, default=20.0, help="planner.timeout_s of each")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="every suite, topology and tightness")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if options.all:
        options.suites, options.ranks, options.tightness = list(SUITES), list(RANKS), list(TIGHTNESS)
    return options


def main(argv: list[str] | None = None) -> list[Outcome]:
    options = parse(argv)
    configure_logging()
    get_logger("pipeline").setLevel(logging.WARNING)
    chosen = {name: planner for name, planner in planners(options.seconds).items() if name in options.planners}
    print(f"{'suite':15} ranks tight {'planner':12}    max_rank  critical_path     gap  seconds    hash")
    outcomes: list[Outcome] = []
    for suite in options.suites:
        for ranks in options.ranks:
            for tightness in options.tightness:
                instance = run_instance(suite, ranks, tightness, chosen, options.repeats)
                print(show(instance), flush=True)
                outcomes += instance
                if options.output:  # after each, for a long run may be stopped
                    _write(options, outcomes)
    print(f"\n{summarize(outcomes)}")
    return outcomes


def _write(options: argparse.Namespace, outcomes: list[Outcome]) -> None:
    report = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "machine": platform.platform(),
        "libraries": library_versions(),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
