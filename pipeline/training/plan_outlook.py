"""Predict steps of planned jobs: one, by world size, and with one setting changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.tables import ConstraintConfig, TableConfig
from pipeline.planner.hardware import Hardware, resolve_hardware
from pipeline.planner.record import PlanRecord
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.planner.step_time.clocks import HOST, Span
from pipeline.planner.step_time.measurements import (
    Measurements,
    differences,
    disturbances,
    read_measurements,
    these_versions,
    this_machine,
    unsteadiness,
)
from pipeline.planner.step_time.outlook import Lever, Outlook, fullest
from pipeline.planner.step_time.predict import StepCost, StepRequest, predict_step
from pipeline.planner.step_time.surroundings import Saves, Surroundings, around_step, speeds_of
from pipeline.runtime.errors import UserError
from pipeline.runtime.logs import get_logger
from pipeline.training.predicted_step import step_cost, step_request

logger = get_logger(__name__)


@dataclass(frozen=True)
class Planned:
    resolved: ResolvedJob
    record: PlanRecord


MakePlan = Callable[[PlanJob], Planned]


def outlook_of(job: PlanJob, planned: Planned) -> Outlook:
    """Raises UserError where the step cannot be predicted: the hardware's peaks are unknown, or the model's shapes."""
    hardware = resolve_hardware(job.hardware, job.world_size)
    measurements = read_measurements(job.hardware.calibration) if job.hardware.calibration else None
    threads = threads_of(job, measurements, hardware.ranks_per_host)
    request = step_request(planned.resolved, planned.record, hardware, threads)
    found = predict_step(request, measurements)
    taken, room = fullest(planned.record)
    train = planned.resolved.dataset.splits.get("train")
    around = _around(job, planned, found.step_ms, request, measurements)
    step_ms = found.step_ms + around.ms
    return Outlook(
        world_size=job.world_size,
        batch_size=request.batch_size,
        step_ms=step_ms,
        samples_per_s=found.samples_per_s * found.step_ms / step_ms,
        parts=found.parts | around.waits_ms,
        spans=[*found.spans, *_waits(found.step_ms, around.waits_ms)],
        source=found.source,
        exposed_comms_ms=found.exposed_comms_ms,
        fullest_bytes=taken,
        room_bytes=room,
        num_samples=train.num_rows if train else None,
        price_per_hour=job.hardware.price_per_hour,
        warnings=tuple(calibration_warnings(measurements)),
        surroundings=tuple(around.lines),
    )


def _around(
    job: PlanJob, planned: Planned, step_ms: float, request: StepRequest, measurements: Measurements | None
) -> Surroundings:
    """Nothing without a calibration: no data sheet says how fast rows are decoded or written."""
    if measurements is None:
        return Surroundings({}, [])
    dataset, hardware = planned.resolved.dataset, request.hardware
    speeds = speeds_of(measurements, len(dataset.dense_features) + len(dataset.sparse_features))
    loads = [load.hbm_bytes + load.ddr_bytes + planned.record.dense_bytes for load in planned.record.ranks]
    saves = Saves(
        job.checkpoint.save_every_steps,
        job.checkpoint.save_every_minutes,
        job.checkpoint.asynchronous,
        max(loads),
        max(loads) * hardware.ranks_per_host,
    )
    computing = hardware.ranks_per_host * (request.threads if hardware.on_cpu else 1)
    spare = measurements.machine.cores - computing
    has_core = spare >= hardware.ranks_per_host
    return around_step(step_ms, request.batch_size, speeds, saves, reader_has_core=has_core)


def _waits(start_ms: float, waits_ms: dict[str, float]) -> Iterator[Span]:
    """One after the other on the host's clock, behind the step."""
    for name, ms in waits_ms.items():
        if ms > 0:
            yield Span(name, HOST, start_ms, ms)
            start_ms += ms


def planned_step_cost(job: TrainJob, resolved: ResolvedJob, hardware: Hardware) -> StepCost:
    """What planner.objective=step_time minimises for a planned job."""
    measurements = read_measurements(job.hardware.calibration) if job.hardware.calibration else None
    threads = threads_of(job, measurements, hardware.ranks_per_host)
    return step_cost(resolved, hardware, threads)


def threads_of(job: TrainJob, measurements: Measurements | None, local_ranks: int) -> int:
    """Of a CPU rank: as the job says, or OMP_NUM_THREADS, or its share of the cores."""
    asked = (job.threads if isinstance(job, PlanJob) else None) or int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
    cores = measurements.machine.cores if measurements else os.cpu_count() or 1
    return asked or max(1, cores // local_ranks)


def calibration_warnings(measurements: Measurements | None) -> Iterator[str]:
    """A line for each way in which the measurements are of another machine or version than this, or were disturbed; none without any."""
    if measurements is None:
        return
    for line in differences(measurements, this_machine(), these_versions()):
        yield f"the calibration is of another machine or version: {line}"
    for line in disturbances(measurements):
        yield f"the calibration is not to be relied on: {line}"
    if line := unsteadiness(measurements):
        yield line


def scaling_of(job: PlanJob, sizes: Sequence[int], make_plan: MakePlan) -> tuple[list[Outlook], list[str]]:
    """An outlook for each world size that a plan was found for, by the job's own global batch; why the others have none."""
    rows, skipped = [], []
    for size in sorted(sizes):
        logger.info("scale       %d ranks", size)
        at_size = replace(job, world_size=size, planner=replace(job.planner, plan_file=_scratch(job, f"x{size}")))
        try:
            rows.append(outlook_of(at_size, make_plan(at_size)))
        except UserError as error:
            skipped.append(f"{size} ranks: {str(error).splitlines()[0]}")
    return rows, skipped


def levers_of(job: PlanJob, make_plan: MakePlan) -> list[Lever]:
    found = []
    for words, changed in _changes(job):
        logger.info("what if     %s", words)
        try:
            other = changed()
            found.append(Lever(words, outlook_of(other, make_plan(other))))
        except UserError as error:
            found.append(Lever(words, None, str(error).splitlines()[0]))
    return found


def _changes(job: PlanJob) -> Iterator[tuple[str, Callable[[], PlanJob]]]:
    """Words of the command line, and the job that they make of this one."""
    trainer, comms = job.trainer, job.comms
    if trainer.precision != "bf16":
        yield "trainer.precision=bf16", lambda: replace(job, trainer=replace(trainer, precision="bf16"))
    for factor in (2, 0.5):
        size = int(trainer.global_batch_size * factor)
        yield (
            f"trainer.global_batch_size={size}",
            lambda size=size: replace(job, trainer=replace(trainer, global_batch_size=size)),  # type: ignore[misc]
        )
    if job.world_size > 1:
        for precision in ("fp16", "int8"):
            yield (
                f"comms={precision}",
                lambda p=precision: replace(  # type: ignore[misc]
                    job, comms=replace(comms, forward_precision=p, backward_precision=p)
                ),
            )
        for kind in ("table_wise", "row_wise", "column_wise"):
            yield f"tables.default.sharding.sharding_types=[{kind}]", lambda kind=kind: _sharded(job, kind)  # type: ignore[misc]
        yield "planner=torchrec", lambda: replace(job, planner=replace(job.planner, kind="torchrec"))
    yield "tables.default.data_type=fp16", lambda: _with_default(job, data_type="fp16")


def _sharded(job: PlanJob, kind: str) -> PlanJob:
    return _with_default(job, sharding=ConstraintConfig(sharding_types=[kind]))


def _with_default(job: PlanJob, **values: object) -> PlanJob:
    default = job.tables.get("default", TableConfig())
    return replace(job, tables={**job.tables, "default": replace(default, **values)})  # type: ignore[arg-type]


def _scratch(job: PlanJob, what: str) -> str:
    return f"{job.planner.plan_file.removesuffix('.json')}.{what}.json"
