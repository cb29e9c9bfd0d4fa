"""Build the model with its loss on meta tensors, with the layers that suit the device."""

from __future__ import annotations

from pipeline import devices
from pipeline.devices.cpu.products import speed_up_linear_layers
from pipeline.devices.cpu.stack import speed_up_stacks
from pipeline.models.build import build_model
from pipeline.models.layers.dlrm import use_torchrec_layers
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.preflight import table_optimizer_of


def build_task(resolved: ResolvedJob, compute_device: str) -> TaskModel:
    """Return the model with its loss.

    Its tables are on meta and carry the sparse optimizer. `compute_device` may be auto.
    """
    job, trainer = resolved.job, resolved.job.trainer
    device = devices.named(compute_device, plain=not job.sharding.fast_cpu)
    num_dense = len(resolved.dataset.dense_features)
    model = build_model(job.model, resolved.tables, num_dense, seed=trainer.seed, targets=resolved.targets)
    if device.has_torchrec_layers:
        use_torchrec_layers(model)
    elif device.has_kernels and trainer.precision == "fp32":
        speed_up_stacks(model)
        speed_up_linear_layers(model)
    task = make_task(
        job.model,
        model,
        resolved.tables,
        resolved.targets,
        precision=trainer.precision,
    )
    l2s = {table.name: table.l2 for table in resolved.plain_tables if table.l2}
    apply_sparse_optimizer(task, table_optimizer_of(job, compute_device), l2s)
    return task
