"""Time whole steps of small jobs beside what their kernels should take, for step_time.host to learn the remainder from."""

from __future__ import annotations

import random

from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.step_time.kernels import MeasuredTimes
from pipeline.planner.step_time.measurements import Conditions, Measurements, these_versions, this_machine
from pipeline.planner.step_time.predict import step_amounts
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.calibration.clock import Bench
from pipeline.training.calibration.jobs import InMemoryTraining, SmallJob, small_jobs
from pipeline.training.predicted_step import step_request

ROUNDS, STEPS = 3, 8
LEAST_JOBS = 6


def measure_jobs(bench: Bench, seconds: float, seed: int, context: DistributedContext) -> None:
    """Collective: rows `job`. The kernels' times come from the bench's own rows, so this goes last."""
    draw = random.Random(seed + 1000)
    so_far = Measurements("", this_machine(), these_versions(), Conditions("", 0, 0, 0, 0), bench.rows)
    times = MeasuredTimes(so_far, bench.setup)
    for job in bench.within(seconds, small_jobs(draw), least=LEAST_JOBS):
        took, spread, amounts = run_job(job, context, times, bench.is_by_cpu)
        bench.add("job", dict(amounts), took, spread)


def run_job(
    job: SmallJob, context: DistributedContext, times: MeasuredTimes, by_cpu: bool
) -> tuple[float, float, dict[str, float]]:
    """Collective: seconds of a step and their spread; and its amounts (step_time.predict.step_amounts)."""
    training = InMemoryTraining(job, context, by_cpu)
    took, spread = training.run(ROUNDS, STEPS)
    config = training.resolved.job
    hardware = resolve_hardware(
        config.hardware, context.world_size, local_world_size=context.local_world_size, device_type="cpu"
    )
    threads = int(times.setup.partition("x")[2])
    request = step_request(training.resolved, training.assembly.plan, hardware, threads)
    return took, spread, {name: round(value, 3) for name, value in step_amounts(request, times).items()}
