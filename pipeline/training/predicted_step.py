"""Predict the step of a job that is resolved and planned: record its layers, and hand them on with the plan."""

from __future__ import annotations

from torch import nn

from pipeline import devices
from pipeline.models.layers.bf16_weights import bf16_copies, keep_bf16_weights
from pipeline.planner.cost_model import wire_of
from pipeline.planner.hardware import Hardware
from pipeline.planner.record import PlanRecord
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.planner.step_time.measurements import read_measurements
from pipeline.planner.step_time.predict import StepCost, StepRequest
from pipeline.planner.step_time.record import DensePart, Inputs, record_dense
from pipeline.sharding.torchrec.sharding import make_sharders
from pipeline.training.assembly import build_task, takes_bf16_weights


def record_layers(resolved: ResolvedJob, batch_size: int, world_size: int, compute_device: str) -> DensePart:
    """The job's layers as one rank runs them on `batch_size` samples. Raises PlanError for a model that fake tensors cannot run."""
    job, tables = resolved.job, resolved.plain_tables
    device = devices.named(compute_device, plain=not job.sharding.fast_cpu)
    alone = device.has_kernels and world_size == 1
    features = [name for table in tables for name in table.feature_names]
    pooling = [factor for table in tables for factor in table.pooling_factors]
    learns_several = job.model.learns_all and len(resolved.targets) > 1
    inputs = Inputs(
        batch_size=batch_size,
        num_dense=len(resolved.dataset.dense_features),
        features=features,
        pooling=pooling,
        num_targets=len(resolved.targets) if learns_several else 1,
        in_place_rows=alone,
        on_cpu=not device.has_own_memory,
    )
    takes_copies = alone and takes_bf16_weights(job)
    return record_dense(
        build_task(resolved, compute_device),
        inputs,
        job.optimizer.dense,
        prepare=_copy_weights if takes_copies else None,
    )


def _copy_weights(model: nn.Module) -> None:
    """As after a first step, which makes the copies."""
    keep_bf16_weights(model)
    for copy in bf16_copies(model):
        copy.numbers()


def step_request(
    resolved: ResolvedJob, plan: PlanRecord | None, hardware: Hardware, threads: int, dense: DensePart | None = None
) -> StepRequest:
    """`hardware`: what the plan is for; `dense`: the layers, where they are recorded already."""
    job = resolved.job
    batch_size = job.trainer.micro_batch_size // hardware.world_size
    layers = dense or record_layers(resolved, batch_size, hardware.world_size, hardware.compute_device)
    return StepRequest(
        dense=layers,
        plan=plan,
        tables=resolved.plain_tables,
        hardware=hardware,
        wire=wire_of(make_sharders(job.comms, job.trainer.seed)),
        batch_size=batch_size,
        optimizer=job.optimizer.sparse.name,
        precision=job.trainer.precision,
        threads=threads,
        shared_memory=job.comms.shared_memory and job.sharding.fast_cpu,
    )


def step_cost(resolved: ResolvedJob, hardware: Hardware, threads: int) -> StepCost:
    """What planner.objective=step_time minimises. Raises UserError where the step cannot be predicted."""
    calibration = resolved.job.hardware.calibration
    measurements = read_measurements(calibration) if calibration else None
    return StepCost(step_request(resolved, None, hardware, threads), measurements)
