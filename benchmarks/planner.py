"""Measure how good a plan each planner finds, whether it finds one at all, and in how many seconds:

    python -m benchmarks.planner [--suites mlperf_dlrmv2 ...] [--ranks 8 16] [--tightness none 1.2] [--output plans.jsonl]
    python -m benchmarks.planner --quick --output plans.jsonl     each suite once or twice: some 12 minutes of one core
    python -m benchmarks.planner --all --output plans.jsonl       every suite, topology and tightness: hours
    python -m benchmarks.planner --report plans.jsonl             what a file holds, as Markdown

Rows are appended to --output one by one, and a run leaves out those that are there: what was stopped goes on.

`max_rank` and `critical_path` are ms a step by the estimates that all planners here share; of each row the best is
marked *. `gap` is what the planner itself proves; search minimises critical_path, search_max_rank the other. `hash` is
the plan's, of the first of --repeats runs, `!` where they differ. torchrec_end is TorchRec's planner with ten minutes,
where --torchrec-seconds did not see it to its end. random, size, dim and lookups cut a table by rows where it takes more than half of a rank and place the others
whole, in that order, on the rank that has least of it; their seconds leave out the estimates, which they do not need.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import logging
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from benchmarks.planner_report import Outcome, append_row, read_rows, report, show, summarize
from benchmarks.planner_suites import RANKS, SUITES, TIGHTNESS, build_request, build_suite, reserve
from pipeline.config.planner import PlannerConfig
from pipeline.planner.chosen_plan import rank_loads
from pipeline.planner.cost_model import CostModel, wire_of
from pipeline.planner.estimator import CostedEnumerator, KeepFree, dense_part_bytes, usable_bytes
from pipeline.planner.hardware import Hardware, build_topology, links_of
from pipeline.planner.plan_record import critical_path_ms
from pipeline.planner.planner import make_plan
from pipeline.planner.request import PlanRequest, build_constraints, place_tables
from pipeline.runtime.logs import configure_logging, get_logger

SMALL_SUITES = ("criteo_kaggle", "mlperf_dlrmv2", "rmc1", "rmc2", "rmc3")
TO_THE_END_S = 600.0
# (suite, ranks, tightness): --quick
QUICK: list[tuple[str, int, float | None]] = [
    ("criteo_kaggle", 8, None), ("criteo_1tb", 8, 1.2), ("criteo_1tb", 64, None), ("mlperf_dlrmv2", 8, None),
    ("mlperf_dlrmv2", 16, 1.2), ("rmc1", 8, None), ("rmc2", 16, 1.05), ("rmc3", 8, None), ("hugectr_180", 16, None),
    ("hugectr_200", 64, 1.2), ("hugectr_510", 64, None), ("hugectr_7", 128, None), ("synthetic_100", 16, None),
    ("synthetic_100", 16, 1.02), ("synthetic_400", 64, None), ("synthetic_856", 128, None), ("synthetic_856", 128, 1.05),
]  # fmt: skip
QUICK_PLANNERS = ("search", "torchrec", "torchrec_dp", "size", "dim", "lookups", "random")
LARGE_SHARE = 0.5  # of a rank's memory: a larger table is cut by rows


@dataclass(frozen=True)
class Found:
    """What a planner made of a request."""

    max_rank_ms: float
    critical_path_ms: float
    plan_hash: str
    seconds: float
    lower_bound_ms: float | None = None
    gap: float | None = None


def by_kind(
    kind: str, request: PlanRequest, fraction: float, seconds: float, objective: str = "critical_path"
) -> Found:
    """One of the planners that `planner.kind` names. Raises ValueError where it finds nothing."""
    config = PlannerConfig(kind, "", fraction, seconds, objective, gap_tolerance=0.0)
    began = time.perf_counter()
    record = make_plan(config, request)
    took = time.perf_counter() - began
    reached = record.objective
    placed = [(choice.name, choice.sharding_type, choice.compute_kernel, choice.ranks) for choice in record.tables]
    return Found(
        reached.max_rank_ms, reached.critical_path_ms, _hash(placed), took, reached.lower_bound_ms, reached.gap
    )


def torchrec_dp(request: PlanRequest, fraction: float, seconds: float) -> Found:
    """TorchRec's planner with its DynamicProgrammingProposer. Raises ValueError where it finds nothing."""
    ready = Ready(request, fraction)
    planner = EmbeddingShardingPlanner(
        topology=ready.topology,
        batch_size=request.batch_size,
        enumerator=ready.enumerator(),
        proposer=DynamicProgrammingProposer(),
        storage_reservation=KeepFree(fraction, ready.dense_bytes),
        constraints=ready.constraints,
        stats=NoopEmbeddingStats(),
        debug=False,
        timeout_seconds=seconds,
    )
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

    def enumerator(self) -> CostedEnumerator:
        request = self.request
        return CostedEnumerator(self.topology, request.batch_size, self.constraints, request.optimizer.name, self.costs)

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


Run = Callable[[PlanRequest, float], Found]


def planners(seconds: float, torchrec_seconds: float) -> dict[str, tuple[Run, float | None]]:
    """Name -> the planner, and the seconds that it may take (None: it takes none worth a limit)."""

    def of_kind(kind: str, limit: float, objective: str = "critical_path") -> tuple[Run, float]:
        return lambda request, fraction: by_kind(kind, request, fraction, limit, objective), limit

    found: dict[str, tuple[Run, float | None]] = {
        "search": of_kind("search", seconds),
        "search_max_rank": of_kind("search", seconds, "max_rank"),
        "torchrec": of_kind("torchrec", torchrec_seconds),
        "torchrec_end": of_kind("torchrec", TO_THE_END_S),
        "torchrec_dp": (lambda request, fraction: torchrec_dp(request, fraction, torchrec_seconds), torchrec_seconds),
    }
    for order in ("size", "dim", "lookups", "random"):
        found[order] = (lambda request, fraction, order=order: greedy(order, request, fraction)), None
    return found


def run_planner(
    suite: str, ranks: int, tightness: float | None, name: str, planner: Run, limit: float | None, repeats: int
) -> Outcome:
    """One planner on one suite, topology and tightness; a fresh request each time, for planners write into options."""
    tables = build_suite(suite)
    outcome = Outcome(suite, ranks, tightness, name, timeout_s=limit, load=os.getloadavg()[0])
    outcome.day, outcome.machine = datetime.date.today().isoformat(), f"{os.cpu_count()} x {platform.machine()}"
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        found = [planner(build_request(tables, ranks, tightness=tightness), reserve(tightness)) for _ in range(repeats)]
    except ValueError as error:
        outcome.seconds, outcome.error = time.perf_counter() - began, str(error).splitlines()[0]
        outcome.cpu_seconds = time.process_time() - began_cpu
        return outcome
    outcome.cpu_seconds = (time.process_time() - began_cpu) / repeats
    first = found[0]
    outcome.feasible, outcome.seconds = True, statistics.median(each.seconds for each in found)
    outcome.complete = limit is None or outcome.seconds < limit
    outcome.max_rank_ms, outcome.critical_path_ms = first.max_rank_ms, first.critical_path_ms
    outcome.lower_bound_ms, outcome.gap, outcome.plan_hash = first.lower_bound_ms, first.gap, first.plan_hash
    outcome.repeatable = len({each.plan_hash for each in found}) == 1 if repeats > 1 else None
    return outcome


def run_instance(
    instance: tuple[str, int, float | None], options: argparse.Namespace, known: dict[str, Outcome]
) -> list[Outcome]:
    """Every planner on one suite, topology and tightness, but those whose rows are `known`; rows go to --output at once."""
    suite, ranks, tightness = instance
    rows: dict[str, Outcome] = {}
    for name, (planner, limit) in planners(options.seconds, options.torchrec_seconds).items():
        if name not in options.planners:
            continue
        if name in known:
            rows[name] = known[name]
            continue
        shorter = rows.get("torchrec") if name == "torchrec_end" else None
        if shorter is not None and (shorter.complete or not shorter.feasible):
            rows[name] = replace(shorter, planner=name)  # more time would change nothing
        else:
            repeats = 1 if name == "torchrec_end" else options.repeats
            rows[name] = run_planner(suite, ranks, tightness, name, planner, limit, repeats)
        if options.output:
            append_row(options.output, rows[name])
    return list(rows.values())


def _tightness(text: str) -> float | None:
    return None if text == "none" else float(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    names = list(planners(0.0, 0.0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=list(SUITES), default=list(SMALL_SUITES), metavar="SUITE")
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=[8])
    parser.add_argument(
        "--tightness", nargs="+", type=_tightness, default=[None, 1.2], help="none, or times the least HBM"
    )
    parser.add_argument("--planners", nargs="+", choices=names, metavar="PLANNER", help=", ".join(names))
    parser.add_argument("--seconds", type=float, default=60.0, help="planner.timeout_s of search")
    parser.add_argument("--torchrec-seconds", type=float, default=20.0, help="of TorchRec's planners")
    parser.add_argument("--repeats", type=int, help="2, or 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="each suite at one or two topologies and tightnesses")
    parser.add_argument("--all", action="store_true", help="every suite, topology and tightness")
    parser.add_argument("--output", type=Path, help="JSON lines; rows that are there are not measured again")
    parser.add_argument("--report", type=Path, help="print the tables of such a file, and measure nothing")
    options = parser.parse_args(argv)
    options.planners = options.planners or (list(QUICK_PLANNERS) if options.quick else names)
    options.repeats = options.repeats or (1 if options.quick else 2)
    return options


def instances(options: argparse.Namespace) -> list[tuple[str, int, float | None]]:
    if options.quick:
        return QUICK
    suites = list(SUITES) if options.all else options.suites
    ranks = list(RANKS) if options.all else options.ranks
    tightness = list(TIGHTNESS) if options.all else options.tightness
    return [(suite, count, tight) for suite in suites for count in ranks for tight in tightness]


def main(argv: list[str] | None = None) -> list[Outcome]:
    options = parse(argv)
    if options.report:
        outcomes = read_rows(options.report)
        print(report(outcomes))
        return outcomes
    configure_logging()
    get_logger("pipeline").setLevel(logging.WARNING)
    known = read_rows(options.output) if options.output else []
    print(f"{'suite':15} ranks tight {'planner':15}    max_rank  critical_path     gap  seconds    hash")
    outcomes = []
    for instance in instances(options):
        rows = run_instance(instance, options, {row.planner: row for row in known if row.instance == instance})
        print(show(rows), flush=True)
        outcomes += rows
    print(f"\n{summarize(outcomes)}")
    return outcomes


if __name__ == "__main__":
    main()
