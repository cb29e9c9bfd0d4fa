"""Compare predicted steps with measured steps, of jobs that no calibration has seen:

    python -m benchmarks.step_time --measure steps.json --calibrate measured.json [--part 0/2] [--seed 1]
    python -m benchmarks.step_time --measure plans.json --setups 2x1 --plans 6 --calibration measured.json
    python -m benchmarks.step_time --report steps.json --calibration measured.json
    python -m benchmarks.step_time --again steps.json later.json

Forty jobs are drawn at random (model, tables, rows, widths, skew, batch, precision, optimizers), by
another seed than the calibration's, and trained on batches in memory, each under one setup of
<ranks>x<threads>. --calibrate calibrates in the same minutes, a pass of each in turns. --plans trains
jobs on several ranks under each sharding type and as the planner chooses: regret is how much longer
the chosen plan takes than the fastest. --again compares two measurements of the same jobs.
--clock cpu counts CPU seconds of one rank with one thread, for a machine that others use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.devices.cpu.process import limit_openmp_spin, use_huge_pages
from pipeline.extras.calibration.job import CalibrateJob
from pipeline.extras.calibration.jobs import SmallJob, small_jobs
from pipeline.extras.calibration.run import Found, Setup, calibration_of, calibration_setups, run_in_turns
from pipeline.extras.step_time.calibration import Calibration, read_calibration, step_us, this_machine

SEED = 20_261_123
NUM_JOBS = 40
CHOSEN, BY_STEP = "critical_path", "step_time"  # planner.objective
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
MIN_APART = 1.1  # ratio of measured steps from which the order of two plans counts


@dataclass(frozen=True)
class Timed:
    """One job under one setup. group: the jobs that are plans of one model have one group."""

    what: str
    setup: str
    ms: float
    spread: float
    amounts: dict[str, float]
    group: str = ""


@dataclass(frozen=True)
class Compared:
    timed: Timed
    predicted_ms: float

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.timed.ms


def jobs_of(options: argparse.Namespace, setup: str) -> list[tuple[str, str, SmallJob]]:
    """(name, group, job): the setup's share of the forty jobs, then plans."""
    part, parts = map(int, options.part.split("/"))
    setups, found = options.setups, []
    drawn = itertools.islice(small_jobs(random.Random(options.seed)), NUM_JOBS)
    for index, job in enumerate(drawn if options.jobs else ()):
        if setups[index % len(setups)] == setup and (index // len(setups)) % parts == part:
            found.append((_name(f"job {index}", job), "", job))
    if setup.startswith("1x"):
        return found
    planned = itertools.islice(small_jobs(random.Random(options.seed + 1)), options.plans)
    for index, job in enumerate(planned):
        variants = {sharding: replace(job, sharding=sharding) for sharding in SHARDINGS} | {CHOSEN: job}
        if options.calibration:
            variants[BY_STEP] = replace(job, calibration=str(options.calibration))
        found += [(f"plan {index} {name}", f"plans {index}", variant) for name, variant in variants.items()]
    return found


def _name(what: str, job: SmallJob) -> str:
    return f"{what} {job.kind} {job.precision} {job.sparse} dim {job.dim} x {len(job.rows)} batch {job.batch}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    named = {setup: jobs_of(options, setup) for setup in options.setups}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        setups = []
        for name, jobs in named.items():
            ranks, threads = map(int, name.split("x"))
            drawn = [job for _, _, job in jobs]
            setups.append(Setup(ranks, threads, drawn, folder, by_cpu=options.clock == "cpu", speeds=False))
        calibrate = CalibrateJob(setups=options.setups, clock=options.clock, force=True)
        if options.calibrate:
            calibrating = calibration_setups(calibrate, other)
            found = run_in_turns([each for pair in zip(calibrating, setups, strict=True) for each in pair])
            measured = calibration_of(calibrate, found[::2], time.monotonic() - started)
            options.calibrate.write_text(measured.to_json())
            found = found[1::2]
        else:
            found = run_in_turns(setups)
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
        "busy_cores": round(max(each.busy_cores for each in found), 2),
        "clock": options.clock,
    }
    return {"about": about, "timed": [asdict(row) for row in _timed(named, found)]}


def _timed(named: dict[str, list[tuple[str, str, SmallJob]]], found: Sequence[Found]) -> Iterator[Timed]:
    for (setup, jobs), each in zip(named.items(), found, strict=True):
        for number, row in each.jobs.items():
            what, group, _ = jobs[number]
            yield Timed(what, setup, row.us / 1e3, row.spread, row.amounts, group)


def read_timed(path: Path) -> list[Timed]:
    return [Timed(**row) for row in json.loads(path.read_text())["timed"]]


def compare(timed: list[Timed], calibration: Calibration) -> list[Compared]:
    """Predict the jobs whose setup the calibration has."""
    rates = {setup: calibration.rates(setup) for setup in calibration.setups}
    return [Compared(each, step_us(each.amounts, rates[each.setup]) / 1e3) for each in timed if each.setup in rates]


def report(found: list[Compared]) -> Iterator[str]:
    jobs = [each for each in found if not each.timed.group]
    for each in jobs:
        timed = each.timed
        yield (
            f"{timed.setup:<4} {timed.what:<75} measured {timed.ms:8.2f} ms ({100 * timed.spread:4.1f} %)  "
            f"predicted {each.predicted_ms:8.2f}  {100 * (each.ratio - 1):+6.1f} %"
        )
    yield from summaries(jobs)
    yield from _plans([each for each in found if each.timed.group])


def summaries(jobs: list[Compared], words: str = "") -> Iterator[str]:
    for name in (*sorted({each.timed.setup for each in jobs}), ""):
        of_setup = [each for each in jobs if name in ("", each.timed.setup)]
        if of_setup:
            yield f"steps {name or 'all'}{words}: {_errors(of_setup)}"


def _errors(found: list[Compared]) -> str:
    logs = [math.log(each.ratio) for each in found]
    mean, worst = sum(map(abs, logs)) / len(logs), max(map(abs, logs))
    spread = sorted(each.timed.spread for each in found)[len(found) // 2]
    return (
        f"geometric mean error {100 * (math.exp(mean) - 1):.1f} %, worst {100 * (math.exp(worst) - 1):.1f} %, "
        f"bias {100 * (math.exp(sum(logs) / len(logs)) - 1):+.1f} %, of {len(found)}; measured themselves to "
        f"{100 * spread:.1f} %"
    )


def _plans(found: list[Compared]) -> Iterator[str]:
    """Whether the prediction orders plans, and how much longer the chosen ones take than the fastest."""
    groups: dict[str, list[Compared]] = {}
    for each in found:
        groups.setdefault(f"{each.timed.group} {each.timed.setup}", []).append(each)
    for objective in (CHOSEN, BY_STEP):
        chosen = [[each for each in plans if each.timed.what.endswith(objective)] for plans in groups.values()]
        pairs = [(own[0], plans) for own, plans in zip(chosen, groups.values(), strict=True) if own]
        if pairs:
            yield f"regret of planner.objective={objective}: {_regret(pairs)}"
    pairs_of_plans = [pair for plans in groups.values() for pair in itertools.combinations(plans, 2)]
    apart = [(a, b) for a, b in pairs_of_plans if abs(math.log(a.timed.ms / b.timed.ms)) > math.log(MIN_APART)]
    right = sum((a.timed.ms < b.timed.ms) == (a.predicted_ms < b.predicted_ms) for a, b in apart)
    if apart:
        yield (
            f"pairs of plans over {100 * (MIN_APART - 1):.0f} % apart: order right in {right} of {len(apart)} "
            f"({100 * right / len(apart):.0f} %)"
        )
        best = [(min(plans, key=lambda each: each.predicted_ms), plans) for plans in groups.values()]
        yield f"regret of the plan predicted to be fastest: {_regret(best)}"
        yield f"steps of plans: {_errors(found)}"


def _regret(chosen: list[tuple[Compared, list[Compared]]]) -> str:
    regrets = [own.timed.ms / min(each.timed.ms for each in plans) - 1 for own, plans in chosen]
    return f"mean {100 * sum(regrets) / len(regrets):.1f} %, worst {100 * max(regrets):.1f} % of {len(regrets)} jobs"


def report_again(before: list[Timed], after: list[Timed]) -> Iterator[str]:
    """What a measurement would be worth as a prediction of the next one."""
    later = {(each.what, each.setup): each for each in after}
    both = [(each, later[each.what, each.setup]) for each in before if (each.what, each.setup) in later]
    yield from summaries([Compared(two, one.ms) for one, two in both], " measured again")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="write what the jobs take to this file")
    parser.add_argument("--calibrate", type=Path, help="calibrate in the same minutes, and write this file")
    parser.add_argument("--report", type=Path, nargs="+", help="files of --measure to compare with predictions")
    parser.add_argument("--calibration", type=Path, help="what to predict by")
    parser.add_argument("--again", type=Path, nargs=2, help="two files of --measure to compare")
    parser.add_argument("--setups", nargs="+", default=["1x1", "1x2", "2x1"], help="<ranks>x<threads>")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--part", default="0/1", help="part i of n of the jobs, from 0")
    parser.add_argument("--no-jobs", dest="jobs", action="store_false", help="plans alone")
    parser.add_argument("--plans", type=int, default=0, help="jobs that are trained under each sharding type")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    use_huge_pages()
    limit_openmp_spin()
    if options.measure:
        os.environ.pop("OMP_NUM_THREADS", None)
        options.measure.write_text(json.dumps(measure(options)))
        print(f"written  {options.measure}")
    if options.report:
        timed = [row for path in options.report for row in read_timed(path)]
        print(*report(compare(timed, read_calibration(str(options.calibration)))), sep="\n")
    if options.again:
        print(*report_again(*map(read_timed, options.again)), sep="\n")


if __name__ == "__main__":
    main()
