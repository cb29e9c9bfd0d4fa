"""Time whole steps of small jobs beside what their kernels should take, for step_time.host to learn the remainder from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.step_time.kernels import MeasuredTimes
from pipeline.planner.step_time.measurements import (
    Conditions,
    Measurement,
    Measurements,
    Number,
    these_versions,
    this_machine,
)
from pipeline.planner.step_time.predict import StepRequest, step_amounts
from pipeline.runtime.errors import UserError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.calibration.clock import Bench
from pipeline.training.calibration.jobs import InMemoryTraining, SmallJob, small_jobs
from pipeline.training.predicted_step import step_request

ROUNDS, STEPS = 3, 8
LEAST_JOBS = 3
SHARDINGS = ("row_wise", "data_parallel", "column_wise")  # of all tables, of every third job on several ranks


class JobSteps:
    """The same small jobs in every pass. Collective: every rank measures them together."""

    def __init__(self, bench: Bench, seed: int, context: DistributedContext) -> None:
        self._bench, self._seed, self._context = bench, seed, context
        self._requests: dict[str, Callable[[], StepRequest]] = {}  # by what a row of Measurement names a job by

    def measure(self, seconds: float) -> None:
        """Rows `job`, of which amounts() makes what step_time.host reads."""
        if not self._requests:
            InMemoryTraining(next(small_jobs(random.Random(self._seed))), self._context)  # compiles kernels
        draw = random.Random(self._seed + 1000)
        for number, job in enumerate(self._bench.within(seconds, small_jobs(draw), least=LEAST_JOBS)):
            forced, kind = divmod(number, 3)
            if self._context.world_size > 1 and kind == 2:
                job = replace(job, sharding=SHARDINGS[forced % len(SHARDINGS)])
            self.time(job)

    def time(self, job: SmallJob) -> None:
        """Nothing where its tables cannot be sharded so."""
        try:
            training = InMemoryTraining(job, self._context, self._bench.is_by_cpu)
        except UserError:
            return
        spec = json.dumps(job.to_json())
        took, spread, beside = training.run(ROUNDS, STEPS)
        self._bench.add("job", {"spec": spec}, took, spread, beside)
        if spec not in self._requests:
            self._requests[spec] = self._request(training)

    def _request(self, training: InMemoryTraining) -> Callable[[], StepRequest]:
        """Made when all is measured, for it takes as long as a measurement."""
        hardware = resolve_hardware(
            training.resolved.job.hardware, self._context.world_size, local_world_size=self._context.local_world_size,
            device_type="cpu",
        )  # fmt: skip
        threads = int(self._bench.setup.partition("x")[2])
        return partial(step_request, training.resolved, training.assembly.plan, hardware, threads)

    def amounts(self, rows: Sequence[Measurement]) -> list[Measurement]:
        """`rows`, of which those of jobs also say what their kernels should take by the other rows (step_time.predict.step_amounts)."""
        measured = Measurements("", this_machine(), these_versions(), Conditions("", 0, 0, 0, 0), list(rows))
        times = MeasuredTimes(measured, self._bench.setup)
        found = []
        for row in rows:
            if row.kind == "job":
                amounts = step_amounts(self._requests[str(row.shape["spec"])](), times)
                shape: dict[str, Number] = {**row.shape, **{name: round(value, 3) for name, value in amounts.items()}}
                row = replace(row, shape=shape)
            found.append(row)
        return found
