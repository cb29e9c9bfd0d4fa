"""Compare predicted steps with measured ones, on jobs that no calibration has seen:

    python -m benchmarks.step_time --calibration conf/hardware/measured.json --output a.json [--part 0/2]
    python -m benchmarks.step_time --report a.json b.json

Forty jobs are drawn at random (model, tables, rows, widths, skew, batch, precision, optimizers), by another seed than the
calibration's, and run under its setups in turn: one rank, one rank on all cores, a rank a core. Each is trained by the
product's Trainer on batches in memory; predicted is what `plan` would print. Beside them: kernels of fresh shapes, and on
several ranks the same jobs under each sharding, whose order the prediction is to tell; regret is what the plan that it
puts first takes longer than the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.planner.step_time.measurements import Measurement, Measurements, read_measurements, this_machine
from pipeline.training.calibration.run import Setup, run_on_ranks

SEED = 20_261_123
NUM_JOBS = 40
SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
APART = 1.1  # measured steps of a pair of plans whose order counts
ROUNDS, STEPS = 5, 8
KERNELS = ("gemm", "bmm", "lookup", "update")


@dataclass(frozen=True)
class Compared:
    """One job, or kernel, under one setup; milliseconds."""

    what: str
    setup: str
    measured_ms: float
    predicted_ms: float
    spread: float
    group: str = ""  # plans of one job have one group

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms


def run_jobs(calibration: str, part: int, parts: int, bench: Any, setup: Setup, context: Any) -> None:
    """Collective: the jobs of this setup and part, as rows that carry their prediction."""
    from pipeline.training.calibration.jobs import small_jobs

    measured = read_measurements(calibration)
    setups = measured.setups
    drawn = itertools.islice(small_jobs(random.Random(SEED)), NUM_JOBS)
    for index, job in enumerate(drawn):
        if setups[index % len(setups)] == setup.name and (index // len(setups)) % parts == part:
            _run_job(job, f"job {index}", measured, bench, context)


def run_plans(calibration: str, count: int, bench: Any, setup: Setup, context: Any) -> None:
    """Collective: jobs under each sharding that all their tables can have."""
    from pipeline.training.calibration.jobs import small_jobs

    measured = read_measurements(calibration)
    for index, job in enumerate(itertools.islice(small_jobs(random.Random(SEED + 1)), count)):
        for sharding in SHARDINGS:
            _run_job(
                replace(job, sharding=sharding), f"plan {index} {sharding}", measured, bench, context, f"plans {index}"
            )


def _run_job(job: Any, what: str, measured: Measurements, bench: Any, context: Any, group: str = "") -> None:
    from pipeline.planner.hardware import resolve_hardware
    from pipeline.planner.step_time.predict import predict_step
    from pipeline.runtime.errors import UserError
    from pipeline.training.calibration.jobs import InMemoryTraining
    from pipeline.training.predicted_step import step_request

    try:
        training = InMemoryTraining(job, context)
    except UserError as error:
        print(f"{what}: left out, {str(error).splitlines()[0]}", flush=True)
        return
    took, spread = training.run(ROUNDS, STEPS)
    config = training.resolved.job
    hardware = resolve_hardware(
        config.hardware, context.world_size, local_world_size=context.world_size, device_type="cpu"
    )
    request = step_request(training.resolved, training.assembly.plan, hardware, int(bench.setup.partition("x")[2]))
    found = predict_step(request, measured)
    kind = f"{what} {job.kind} {job.precision} {job.sparse} dim {job.dim} x {len(job.rows)} batch {job.batch}"
    parts = {name: round(ms, 4) for name, ms in found.parts.items()}
    bench.add(
        "compared",
        {"what": kind, "predicted_ms": found.step_ms, "group": group, "parts": json.dumps(parts)},
        took,
        spread,
    )


def run_kernels(calibration: str, seconds: float, bench: Any, setup: Setup, context: Any) -> None:
    """Collective: kernels of fresh shapes beside what the calibration says of them."""
    from pipeline.training.calibration.clock import Bench
    from pipeline.training.calibration.dense import measure_dense
    from pipeline.training.calibration.tables import measure_tables

    fresh = Bench(setup.name, agree=bench.agree)
    measure_dense(fresh, seconds / 2, SEED)
    measure_tables(fresh, seconds / 2, SEED)
    times = Kernels(read_measurements(calibration), setup.name)
    for row in fresh.rows:
        if row.kind in KERNELS:
            predicted = times.us(row)
            bench.add(
                "compared",
                {"what": row.kind, "predicted_ms": predicted / 1e3, "group": "kernel"},
                row.us / 1e6,
                row.spread,
            )


class Kernels:
    """What a calibration says of a measured kernel's shape."""

    def __init__(self, measured: Measurements, setup: str) -> None:
        from pipeline.planner.step_time.kernels import MeasuredTimes

        self._times = MeasuredTimes(measured, setup)

    def us(self, row: Measurement) -> float:
        shape = row.shape
        if row.kind in ("gemm", "bmm"):
            sizes = (float(shape.get(name, 1)) for name in ("b", "m", "n", "k"))
            return self._times.product_us(row.kind, str(shape["layout"]), str(shape["dtype"]), *sizes)
        return self._times.table_us(
            row.kind, str(shape["optimizer"]), {k: float(v) for k, v in shape.items() if k != "optimizer"}
        )


def measure(calibration: str, part: int, parts: int, plans: int, kernel_seconds: float) -> dict[str, Any]:
    found, busy = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(read_measurements(calibration).setups):
            ranks, threads = map(int, name.split("x"))
            works = [partial(run_jobs, calibration, part, parts)]
            works += [partial(run_kernels, calibration, kernel_seconds)] if kernel_seconds else []
            works += [partial(run_plans, calibration, plans)] if plans and ranks > 1 else []
            for index, work in enumerate(works):
                (Path(folder) / f"{number}.{index}").mkdir()
                rows, others = run_on_ranks(Setup(ranks, threads, 100.0, SEED, f"{folder}/{number}.{index}"), work)
                busy = max(busy, others)
                found += [_compared(row) for row in rows.rows]
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
        "busy_cores": busy,
    }
    return {"about": about, "compared": [asdict(each) for each in found]}


def _compared(row: Measurement) -> Compared:
    shape = row.shape
    return Compared(
        str(shape["what"]), row.setup, row.us / 1e3, float(shape["predicted_ms"]), row.spread, str(shape["group"])
    )


def report(found: list[Compared]) -> Iterator[str]:
    jobs = [each for each in found if not each.group]
    for each in jobs:
        yield (
            f"{each.setup:<4} {each.what:<75} measured {each.measured_ms:8.2f} ms ({100 * each.spread:4.1f} %)  predicted "
            f"{each.predicted_ms:8.2f}  {100 * (each.ratio - 1):+6.1f} %"
        )
    for name in (*sorted({each.setup for each in jobs}), ""):
        of_setup = [each for each in jobs if name in ("", each.setup)]
        if of_setup:
            yield f"steps {name or 'all'}: {_errors(of_setup)}"
    for kind in KERNELS:
        kernels = [each for each in found if each.group == "kernel" and each.what == kind]
        if kernels:
            yield f"kernel {kind}: {_errors(kernels)}"
    yield from _plans([each for each in found if each.group.startswith("plans")])


def _errors(found: list[Compared]) -> str:
    worst = max(found, key=lambda each: abs(math.log(each.ratio)))
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
    yield f"pairs of plans over {100 * (APART - 1):.0f} % apart: order right in {right} of {len(apart)} ({100 * right / len(apart):.0f} %)"
    yield f"regret of the plan predicted to be fastest: mean {100 * sum(regrets) / len(regrets):.1f} %, worst {100 * max(regrets):.1f} % of {len(groups)} jobs"
    yield f"steps of plans: {_errors(found)}"


def _regret(plans: list[Compared]) -> float:
    chosen = min(plans, key=lambda each: each.predicted_ms)
    return chosen.measured_ms / min(each.measured_ms for each in plans) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", help="the .json of python -m pipeline.calibrate")
    parser.add_argument("--part", default="0/1", help="of the jobs: 0/2 and 1/2 are the two halves")
    parser.add_argument("--plans", type=int, default=0, help="jobs that are run under each sharding")
    parser.add_argument(
        "--kernels", type=float, default=0.0, help="seconds for kernels of fresh shapes, under each setup"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report", nargs="+", type=Path)
    options = parser.parse_args()
    if options.report:
        values = [json.loads(path.read_text()) for path in options.report]
        print(*(value["about"] for value in values), sep="\n")
        print(*report([Compared(**row) for value in values for row in value["compared"]]), sep="\n")
        return
    from pipeline.runtime.process.openmp import wait_briefly

    wait_briefly()
    os.environ.pop("OMP_NUM_THREADS", None)
    part, parts = map(int, options.part.split("/"))
    values = measure(str(Path(options.calibration).resolve()), part, parts, options.plans, options.kernels)
    if options.output:
        options.output.write_text(json.dumps(values, indent=1))
    print(values["about"])
    print(*report([Compared(**row) for row in values["compared"]]), sep="\n")


if __name__ == "__main__":
    main()
