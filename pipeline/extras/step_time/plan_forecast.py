"""Forecast the step of a planned job: unchanged, at other world sizes, and with one setting
changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.tables import ConstraintConfig, TableConfig
from pipeline.extras.step_time.calibration import (
    Calibration,
    differences,
    disturbances,
    read_calibration,
    these_versions,
    this_machine,
)
from pipeline.extras.step_time.clocks import HOST, Span
from pipeline.extras.step_time.forecast import (
    PlanForecast,
    WhatIf,
    describe_forecast,
    describe_scaling,
    describe_what_ifs,
    fullest,
)
from pipeline.extras.step_time.overheads import Overheads, Saves, overheads_of
from pipeline.extras.step_time.prediction import StepCost, StepRequest, predict_step
from pipeline.extras.step_time.recorded_layers import PRODUCTS, DensePart, Inputs, record_dense
from pipeline.planner.cost_model import wire_of
from pipeline.planner.plan_record import PlanRecord
from pipeline.planner.planner import make_plan
from pipeline.planner.request import PlannedJob, PlanRequest
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.errors import UserError
from pipeline.runtime.logs import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Foresight:
    """Hold the result. lines: text for the terminal. forecasts: the job's forecast, then those for
    other world sizes.

    If the step cannot be predicted, there are no forecasts, and a line says why.
    """

    lines: list[str]
    forecasts: list[PlanForecast]


Prepare = Callable[[PlanJob], tuple[ResolvedJob, PlanRequest]]  # builds the model on meta


def plan_job(job: PlanJob, prepare: Prepare, suggests: bool = True) -> PlannedJob:
    resolved, request = prepare(job)
    request = replace(request, suggests=suggests)
    return PlannedJob(resolved, request, make_plan(job.planner, request))


def foresee(job: PlanJob, planned: PlannedJob, prepare: Prepare) -> Foresight:
    """Forecast the planned job, the world sizes of job.scale_to, and the effect of changed
    settings.
    """
    try:
        forecast = forecast_of(job, planned)
    except UserError as error:
        return Foresight([f"step        not predicted: {str(error).splitlines()[0]}"], [])
    lines = describe_forecast(forecast)
    rows, skipped = scaling_of(job, job.scale_to, prepare) if job.scale_to else ([], [])
    if rows or skipped:
        lines += ["", *describe_scaling([forecast, *rows])]
        lines += [f"not in the table: {line}" for line in skipped]
    if job.what_if:
        lines += ["", *describe_what_ifs(forecast, what_ifs_of(job, prepare))]
    return Foresight(lines, [forecast, *rows])


def record_layers(resolved: ResolvedJob, request: PlanRequest) -> DensePart:
    """Record the layers of one rank. Raises PlanError if the model does not run on fake tensors."""
    job, tables = resolved.job, resolved.plain_tables
    learns_several = job.model.learns_all and len(resolved.targets) > 1
    inputs = Inputs(
        batch_size=request.batch_size,
        num_dense=len(resolved.dataset.dense_features),
        features=[name for table in tables for name in table.feature_names],
        pooling=[factor for table in tables for factor in table.pooling_factors],
        num_targets=len(resolved.targets) if learns_several else 1,
    )
    dense = record_dense(request.model, inputs, job.optimizer.dense)
    if job.trainer.precision != "tf32":
        return dense
    return replace(
        dense,
        operations=[replace(each, dtype="tf32") if each.name in PRODUCTS else each for each in dense.operations],
    )


def step_request(resolved: ResolvedJob, request: PlanRequest, plan: PlanRecord | None, threads: int) -> StepRequest:
    return StepRequest(
        dense=record_layers(resolved, request),
        plan=plan,
        tables=resolved.plain_tables,
        hardware=request.hardware,
        wire=wire_of(request.sharders),
        batch_size=request.batch_size,
        optimizer=request.optimizer.name,
        threads=threads,
    )


def step_cost_of(resolved: ResolvedJob, request: PlanRequest, threads: int | None = None) -> StepCost:
    """Return the StepCost that planner.objective=step_time minimizes.

    Raises UserError if the step cannot be predicted.

    threads: threads of a CPU rank; None: the number that the job or the environment sets.
    """
    calibration = _calibration_of(resolved.job)
    for line in calibration_warnings(calibration):
        logger.warning("planning by the predicted step, but %s", line)
    threads = threads or threads_of(resolved.job, calibration, request.hardware.ranks_per_host)
    return StepCost(step_request(resolved, request, None, threads), calibration)


def forecast_of(job: PlanJob, planned: PlannedJob) -> PlanForecast:
    """Return the forecast.

    Raises UserError if the hardware's peaks or the model's shapes are unknown.
    """
    calibration, hardware = _calibration_of(job), planned.request.hardware
    threads = threads_of(job, calibration, hardware.ranks_per_host)
    request = step_request(planned.resolved, planned.request, planned.record, threads)
    found = predict_step(request, calibration)
    taken, room = fullest(planned.record)
    train = planned.resolved.dataset.splits.get("train")
    around = _overheads(job, planned, found.step_ms, threads, calibration)
    step_ms = found.step_ms + around.ms
    return PlanForecast(
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
        warnings=tuple(calibration_warnings(calibration)),
        overheads=tuple(around.lines),
    )


def _calibration_of(job: TrainJob) -> Calibration | None:
    return read_calibration(job.hardware.calibration) if job.hardware.calibration else None


def _overheads(
    job: PlanJob, planned: PlannedJob, step_ms: float, threads: int, calibration: Calibration | None
) -> Overheads:
    """Return the overheads. Without a calibration there are none, because a data sheet has no
    speeds of reading or writing rows.
    """
    if calibration is None:
        return Overheads({}, [])
    dataset, hardware = planned.resolved.dataset, planned.request.hardware
    num_columns = len(dataset.dense_features) + len(dataset.sparse_features)
    reading_ms = planned.request.batch_size * calibration.speeds.row_us(num_columns) / 1e3
    loads = [load.hbm_bytes + load.ddr_bytes + planned.record.dense_bytes for load in planned.record.ranks]
    saves = Saves(
        job.checkpoint.save_every_steps,
        job.checkpoint.save_every_minutes,
        job.checkpoint.asynchronous,
        max(loads),
        max(loads) * hardware.ranks_per_host,
    )
    computing = hardware.ranks_per_host * (threads if hardware.on_cpu else 1)
    has_core = calibration.machine.cores - computing >= hardware.ranks_per_host
    return overheads_of(step_ms, reading_ms, calibration.speeds, saves, reader_has_core=has_core)


def _waits(start_ms: float, waits_ms: dict[str, float]) -> Iterator[Span]:
    """Yield the waits, one after the other, on the host's clock. They follow the step."""
    for name, ms in waits_ms.items():
        if ms > 0:
            yield Span(name, HOST, start_ms, ms)
            start_ms += ms


def threads_of(job: TrainJob, calibration: Calibration | None, local_ranks: int) -> int:
    """Return the threads of a CPU rank: from the job, from OMP_NUM_THREADS, or its share of the
    cores.
    """
    asked = (job.threads if isinstance(job, PlanJob) else None) or int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
    cores = calibration.machine.cores if calibration else os.cpu_count() or 1
    return asked or max(1, cores // local_ranks)


def calibration_warnings(calibration: Calibration | None) -> Iterator[str]:
    """Report how the calibration's machine and versions differ from this machine's, and what
    disturbed it.
    """
    if calibration is None:
        return
    for line in differences(calibration, this_machine(), these_versions()):
        yield f"the calibration is of another machine or version: {line}"
    for line in disturbances(calibration):
        yield f"the calibration is not reliable: {line}"


def scaling_of(job: PlanJob, sizes: Sequence[int], prepare: Prepare) -> tuple[list[PlanForecast], list[str]]:
    """Forecast each world size with the job's global batch. Also return why some world sizes have no plan."""
    rows, skipped = [], []
    for size in sorted(sizes):
        logger.info("scale       %d ranks", size)
        at_size = replace(job, world_size=size, planner=replace(job.planner, plan_file=_scratch(job, f"x{size}")))
        try:
            rows.append(forecast_of(at_size, plan_job(at_size, prepare)))
        except UserError as error:
            skipped.append(f"{size} ranks: {str(error).splitlines()[0]}")
    return rows, skipped


def what_ifs_of(job: PlanJob, prepare: Prepare) -> list[WhatIf]:
    found = []
    for words, changed in _changes(job):
        logger.info("what if     %s", words)
        try:
            other = changed()
            found.append(WhatIf(words, forecast_of(other, plan_job(other, prepare))))
        except UserError as error:
            found.append(WhatIf(words, None, str(error).splitlines()[0]))
    return found


def _changes(job: PlanJob) -> Iterator[tuple[str, Callable[[], PlanJob]]]:
    """Yield overrides of the command line, and the changed job."""
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
