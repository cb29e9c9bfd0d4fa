"""Compare predicted steps with measured ones, on jobs that no calibration has seen:

    python -m benchmarks.step_time --measure steps.json --setups 1x1 1x2 2x1 [--part 0/2] [--seed 1] [--kernels 20]
    python -m benchmarks.step_time --measure plans.json --setups 2x1 --no-jobs --plans 6 --calibration measured.json
    python -m benchmarks.step_time --report steps.json --calibration conf/hardware/measured.json
    python -m benchmarks.step_time --measure steps.json --calibrate measured.json
    python -m benchmarks.step_time --again steps.json later.json

Forty jobs are drawn at random (model, tables, rows, widths, skew, batch, precision, optimizers), by another seed than the
calibration's, and run under the setups of <ranks>x<threads> in turn: each is trained by the product's Trainer on batches in memory.
The report sets what `plan` would predict beside that. Further: kernels of fresh shapes, and on several ranks the same jobs under each
sharding, and as the planner chooses, whose order the prediction is to tell; regret is what the plan that it puts first, or that
the planner chooses, takes longer than the fastest.
The machine's rate is measured beside each job: the report tells errors as they are, and those of predictions for that rate.
--calibrate calibrates in the minutes in which the jobs run, a pass of each by turns: what predictions are off then does not come from what the machine
does from hour to hour. --again says how far two measurements of the same jobs and kernels lie apart: what a step measured before would be off as a prediction.
--clock cpu counts CPU seconds of one rank with one thread, on a machine that others use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipeline.config.jobs.machine import CalibrateJob
from pipeline.devices.cpu.process import use_huge_pages, wait_briefly
from pipeline.planner.constraints import TableOptimizer
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.planner import make_plan
from pipeline.planner.request import PlanRequest
from pipeline.planner.step_time.kernels import MeasuredTimes
from pipeline.planner.step_time.layer_kernels import DOTS, STACKS
from pipeline.planner.step_time.machine_state import PROBES, calibrated_probes, slowdown
from pipeline.planner.step_time.measurements import Measurement, Measurements, read_measurements, this_machine
from pipeline.planner.step_time.predict import StepRequest, predict_step
from pipeline.planner.step_time.products import Multiplied
from pipeline.runtime.errors import UserError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.sharding import make_sharders
from pipeline.training.assembly import build_task
from pipeline.training.calibration.clock import PASSES, Bench, fastest
from pipeline.training.calibration.dense import measure_dense
from pipeline.training.calibration.jobs import InMemoryTraining, SmallJob, small_jobs
from pipeline.training.calibration.run import Setup, Work, calibration_works, measurements_of, run_in_turns
from pipeline.training.calibration.tables import measure_tables
from pipeline.training.predicted_step import step_cost, step_request

MOST_S = 300.0  # a work's: after some times as long it is taken for hung
SEED = 20_261_123
NUM_JOBS = 40
CHOSEN, BY_STEP = "critical_path", "step_time"  # planner.objective
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
OVER = object()
APART = 1.1  # measured steps of a pair of plans whose order counts
ROUNDS, STEPS = 3, 8
KERNELS = ("gemm", "bmm", *DOTS, *STACKS, "lookup", "update")


@dataclass(frozen=True)
class Timed:
    """What was measured of one job or kernel. `spec`: SmallJob's fields; kernel: the measurement's kind and shape."""

    what: str
    setup: str
    ms: float
    spread: float
    group: str = ""  # plans of one job have one group
    spec: dict[str, Any] | None = None
    kernel: dict[str, Any] | None = None
    beside: dict[str, float] = field(default_factory=dict)  # of a job: what the probes took


@dataclass(frozen=True)
class Compared:
    """One job, or kernel, under one setup; milliseconds. slower: by probe, how many times as long it took as in the calibration."""

    what: str
    setup: str
    measured_ms: float
    predicted_ms: float
    spread: float
    group: str = ""
    slower: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms


def run_jobs(
    jobs: list[tuple[str, str, SmallJob]], bench: Bench, setup: Setup, context: DistributedContext
) -> Iterator[None]:
    """Collective: (name, group, job) each, one after the other, in passes as calibrate makes them."""
    fresh = Bench(setup.name, clock=bench.clock, agree=bench.agree)
    for number in range(PASSES):
        for what, group, job in jobs:
            try:
                training = InMemoryTraining(job, context, bench.is_by_cpu)
            except UserError as error:
                if not number:
                    print(f"{what}: left out, {str(error).splitlines()[0]}", flush=True)
                continue
            took, spread, beside = training.run(ROUNDS, STEPS)
            fresh.add("job", {"what": what, "group": group, "spec": json.dumps(job.to_json())}, took, spread, beside)
        yield
    bench.rows += fastest(fresh.rows)


def run_kernels(seconds: float, seed: int, bench: Bench, setup: Setup, context: DistributedContext) -> Iterator[None]:
    """Collective: kernels of fresh shapes, others by each seed."""
    fresh = Bench(setup.name, clock=bench.clock, agree=bench.agree)
    for _ in range(PASSES):
        measure_dense(fresh, seconds / 2 / PASSES, SEED + 7 + seed)
        measure_tables(fresh, seconds / 2 / PASSES, SEED + 7 + seed)
        yield
    bench.rows += [row for row in fastest(fresh.rows) if row.kind in KERNELS]


def run_all(works: list[Work], bench: Bench, setup: Setup, context: DistributedContext) -> Iterator[None]:
    """A turn is a pass of each."""
    running = [work(bench, setup, context) for work in works]
    while running := [each for each in running if next(each, OVER) is not OVER]:
        yield


def jobs_of(seed: int, setup: str, setups: list[str], part: int, parts: int) -> list[tuple[str, str, SmallJob]]:
    drawn = enumerate(itertools.islice(small_jobs(random.Random(seed)), NUM_JOBS))
    return [
        (f"job {index}", "", job)
        for index, job in drawn
        if setups[index % len(setups)] == setup and (index // len(setups)) % parts == part
    ]


def plans_of(seed: int, count: int, calibration: str | None) -> list[tuple[str, str, SmallJob]]:
    """Each job under each sharding, as the planner's own costs choose, and as the predicted step does."""
    drawn = enumerate(itertools.islice(small_jobs(random.Random(seed + 1)), count))
    found = []
    for index, job in drawn:
        variants = {sharding: replace(job, sharding=sharding) for sharding in SHARDINGS} | {CHOSEN: job}
        if calibration:
            variants[BY_STEP] = replace(job, calibration=calibration)
        found += [(f"plan {index} {name}", f"plans {index}", variant) for name, variant in variants.items()]
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        turns = [(_setup_of(name, options, folder), partial(run_all, _works(name, options))) for name in options.setups]
        calibrating: list[tuple[Setup, Work]] = []
        if options.calibrate:
            apart = Path(folder) / "calibration"
            apart.mkdir()
            calibrating = calibration_works(CalibrateJob(setups=options.setups), str(apart))
        started = time.monotonic()
        pairs = zip(calibrating, turns, strict=True) if calibrating else ((each,) for each in turns)
        answers = run_in_turns([work for pair in pairs for work in pair])
    if options.calibrate:
        calibrated, answers = answers[::2], answers[1::2]
        table = measurements_of(CalibrateJob(force=True), calibrated, time.monotonic() - started)
        options.calibrate.write_text(table.to_json())
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
        "busy_cores": round(max(others for _, others in answers), 2),
        "clock": options.clock,
    }
    return {"about": about, "timed": [asdict(_timed(row)) for found, _ in answers for row in found.rows]}


def _setup_of(name: str, options: argparse.Namespace, folder: str) -> Setup:
    ranks, threads = map(int, name.split("x"))
    return Setup(ranks, threads, MOST_S, SEED, folder, options.clock == "cpu")


def _works(setup: str, options: argparse.Namespace) -> list[Work]:
    part, parts = map(int, options.part.split("/"))
    works: list[Work] = []
    if options.jobs:
        works.append(partial(run_jobs, jobs_of(options.seed, setup, options.setups, part, parts)))
    if options.kernels:
        works.append(partial(run_kernels, options.kernels, options.seed))
    if options.plans and not setup.startswith("1x"):
        works.append(partial(run_jobs, plans_of(options.seed, options.plans, options.calibration)))
    return works


def read_timed(path: Path) -> list[Timed]:
    return [Timed(**row) for row in json.loads(path.read_text())["timed"]]


def _timed(row: Measurement) -> Timed:
    shape = row.shape
    if row.kind != "job":
        return Timed(row.kind, row.setup, row.us / 1e3, row.spread, "kernel", kernel={"kind": row.kind, "shape": shape})
    spec = json.loads(str(shape["spec"]))
    return Timed(str(shape["what"]), row.setup, row.us / 1e3, row.spread, str(shape["group"]), spec, beside=row.beside)


def compare(timed: list[Timed], measured: Measurements, at_rate_beside: bool = False) -> list[Compared]:
    """Jobs and kernels whose setup the calibration has, beside what it predicts.

    at_rate_beside: jobs alone, as predicted for the rate that the machine had beside each.
    """
    kernels = {setup: MeasuredTimes(measured, setup) for setup in measured.setups}
    found = []
    for each in timed:
        slower: dict[str, float] = {}
        if each.setup not in kernels or (at_rate_beside and not each.beside):
            continue
        if each.spec is not None:
            job = SmallJob(**each.spec)
            what = (
                f"{each.what} {job.kind} {job.precision} {job.sparse} dim {job.dim} x {len(job.rows)} batch {job.batch}"
            )
            predicted = predict_job(job, each.setup, measured, each.beside if at_rate_beside else {})
            slower = slowdown(each.beside, calibrated_probes(measured, each.setup)) if each.beside else {}
        else:
            assert each.kernel is not None
            what = each.what
            row = Measurement(each.kernel["kind"], each.setup, each.kernel["shape"], 0.0)
            predicted = kernel_us(kernels[each.setup], row) / 1e3
        found.append(Compared(what, each.setup, each.ms, predicted, each.spread, each.group, slower))
    return found


@cache
def _request(spec: str, setup: str) -> StepRequest:
    """Of a job, from its config alone: planned and recorded."""
    job = SmallJob(**json.loads(spec))
    ranks, threads = map(int, setup.split("x"))
    resolved = job.resolve(ranks)
    hardware = resolve_hardware(resolved.job.hardware, ranks)
    optimizer = TableOptimizer(resolved.job.optimizer.sparse.name, resolved.job.optimizer.sparse.weight_decay)
    request = PlanRequest(
        resolved.plain_tables,
        build_task(resolved, "cpu"),
        make_sharders(resolved.job.comms),
        hardware,
        optimizer,
        job.batch,
        step_cost=partial(step_cost, resolved, hardware, threads),
    )
    plan = make_plan(resolved.job.planner, request)
    return step_request(resolved, plan, hardware, threads)


def predict_job(job: SmallJob, setup: str, measured: Measurements, beside: dict[str, float]) -> float:
    """Milliseconds of a step."""
    return predict_step(_request(json.dumps(job.to_json()), setup), measured, beside).step_ms


def kernel_us(times: MeasuredTimes, row: Measurement) -> float:
    """What a calibration says of a kernel's shape."""
    shape = row.shape
    if row.kind in ("gemm", "bmm"):
        sizes = (float(shape.get(name, 1)) for name in ("b", "m", "n", "k"))
        how = Multiplied(row.kind, str(shape["layout"]), str(shape["dtype"]), str(shape.get("library", "")))
        return times.product_us(how, *sizes)
    if row.kind in DOTS + STACKS:
        return times.layer_kernel_us(row) or math.nan
    return times.table_us(row.kind, times.amounts_of(row))


def report(found: list[Compared]) -> Iterator[str]:
    jobs = [each for each in found if not each.group]
    for each in jobs:
        yield (
            f"{each.setup:<4} {each.what:<75} measured {each.measured_ms:8.2f} ms ({100 * each.spread:4.1f} %)  predicted "
            f"{each.predicted_ms:8.2f}  {100 * (each.ratio - 1):+6.1f} %"
            + "".join(f"  {name} x {ratio:.2f}" for name, ratio in each.slower.items())
        )
    yield from _summaries(jobs)
    for kind in KERNELS:
        kernels = [each for each in found if each.group == "kernel" and each.what == kind]
        if kernels:
            yield f"kernel {kind}: {_errors(kernels)}"
    yield from _plans([each for each in found if each.group.startswith("plans")])


def _summaries(jobs: list[Compared], words: str = "") -> Iterator[str]:
    for name in (*sorted({each.setup for each in jobs}), ""):
        of_setup = [each for each in jobs if name in ("", each.setup)]
        if of_setup:
            yield f"steps {name or 'all'}{words}: {_errors(of_setup)}"


def report_at_rate(found: list[Compared]) -> Iterator[str]:
    """How far off jobs are, and how fast the machine was, where that was measured beside them."""
    jobs = [each for each in found if not each.group]
    yield from _summaries(jobs, " at the rate measured beside them")
    for name in PROBES:
        ratios = sorted(each.slower[name] for each in jobs)
        if ratios:
            yield f"probe {name}: {ratios[0]:.2f} to {ratios[-1]:.2f} times the calibration's, {ratios[len(ratios) // 2]:.2f} at the median"


def report_again(before: list[Timed], after: list[Timed]) -> Iterator[str]:
    """What a measurement would be worth as a prediction of the next one."""

    def key(each: Timed) -> str:
        return json.dumps([each.what, each.setup, each.group, each.spec, each.kernel], sort_keys=True)

    later = {key(each): each for each in after}
    both = [(each, later[key(each)]) for each in before if key(each) in later]
    found = [Compared(one.what, one.setup, two.ms, one.ms, two.spread, one.group) for one, two in both]
    yield from _summaries([each for each in found if not each.group], " measured again")
    for kind in KERNELS:
        kernels = [each for each in found if each.group == "kernel" and each.what == kind]
        if kernels:
            yield f"kernel {kind} measured again: {_errors(kernels)}"


def _errors(found: list[Compared]) -> str:
    worst = max(found, key=lambda each: abs(math.log(each.ratio)))  # half as long is as far off as twice as long
    over = math.exp(sum(math.log(each.ratio) for each in found) / len(found))
    return (
        f"geometric mean error {100 * geometric_error(found):.1f} %, worst {100 * abs(worst.ratio - 1):.1f} %, "
        f"bias {100 * (over - 1):+.1f} %, of {len(found)}; measured themselves to {100 * sorted(e.spread for e in found)[len(found) // 2]:.1f} %"
    )


def geometric_error(found: Iterable[Compared]) -> float:
    """Of max(predicted / measured, measured / predicted) - 1: no error of zero makes the mean zero."""
    logs = [abs(math.log(each.ratio)) for each in found]
    return math.exp(sum(logs) / len(logs)) - 1


def _plans(found: list[Compared]) -> Iterator[str]:
    groups = [list(group) for _, group in itertools.groupby(found, key=lambda each: (each.setup, each.group))]
    pairs = [pair for group in groups for pair in itertools.combinations(group, 2)]
    apart = [(a, b) for a, b in pairs if max(a.measured_ms, b.measured_ms) > APART * min(a.measured_ms, b.measured_ms)]
    if not apart:
        return
    right = sum((a.predicted_ms < b.predicted_ms) == (a.measured_ms < b.measured_ms) for a, b in apart)
    regrets = [_regret(group) for group in groups]
    for objective in (CHOSEN, BY_STEP):
        own = [
            _regret(group, objective) for group in groups if any(each.what.split()[2] == objective for each in group)
        ]
        if own:
            yield f"regret of planner.objective={objective}: mean {100 * sum(own) / len(own):.1f} %, worst {100 * max(own):.1f} % of {len(own)} jobs"
    yield f"pairs of plans over {100 * (APART - 1):.0f} % apart: order right in {right} of {len(apart)} ({100 * right / len(apart):.0f} %)"
    yield f"regret of the plan predicted to be fastest: mean {100 * sum(regrets) / len(regrets):.1f} %, worst {100 * max(regrets):.1f} % of {len(groups)} jobs"
    yield f"steps of plans: {_errors(found)}"


def _regret(plans: list[Compared], objective: str = "") -> float:
    """Of the plan of an objective, or of the one predicted to be fastest, beside the fastest measured."""
    of_objective = [each for each in plans if not objective or each.what.split()[2] == objective]
    chosen = min(of_objective, key=lambda each: each.predicted_ms)
    return chosen.measured_ms / min(each.measured_ms for each in plans) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="the file that is written")
    parser.add_argument("--setups", nargs="+", default=["1x1", "1x2", "2x1"])
    parser.add_argument("--part", default="0/1", help="of the jobs: 0/2 and 1/2 are the two halves")
    parser.add_argument("--seed", type=int, default=SEED, help="of the jobs: another one, other jobs")
    parser.add_argument("--no-jobs", dest="jobs", action="store_false", help="kernels and plans alone")
    parser.add_argument("--calibrate", type=Path, help="the .json of a calibration that is made by turns with the jobs")
    parser.add_argument("--plans", type=int, default=0, help="jobs that are run under each sharding")
    parser.add_argument("--kernels", type=float, default=0.0, help="seconds for kernels, under each setup")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--report", nargs="+", type=Path, help="files that --measure has written")
    parser.add_argument("--again", nargs=2, type=Path, help="two such files of the same jobs")
    parser.add_argument("--calibration", help="the .json of python -m pipeline calibrate")
    options = parser.parse_args()
    if options.measure:
        os.environ.pop("OMP_NUM_THREADS", None)
        wait_briefly()
        use_huge_pages()
        options.measure.write_text(json.dumps(measure(options), indent=1))
        print(f"written  {options.measure}")
    if options.again:
        print(*report_again(*map(read_timed, options.again)), sep="\n")
    if options.report:
        logging.disable(logging.WARNING)
        values = [json.loads(path.read_text()) for path in options.report]
        measured = read_measurements(options.calibration)
        print("calibration", measured.conditions)
        print(*(value["about"] for value in values), sep="\n")
        timed = [each for path in options.report for each in read_timed(path)]
        print(*report(compare(timed, measured)), sep="\n")
        print(*report_at_rate(compare(timed, measured, at_rate_beside=True)), sep="\n")


if __name__ == "__main__":
    main()
