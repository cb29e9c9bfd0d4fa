"""Turn a train job and its data set into resolved tables, or an error before torch is imported or memory is allocated."""

from __future__ import annotations

from pipeline import storage
from pipeline.data.config import check_batch_geometry
from pipeline.data.dataset import FILE_NAME, Dataset, check_multi_hot, check_split, load_dataset
from pipeline.embeddings.config import Table, resolve_tables
from pipeline.jobs import EvaluateJob, TrainJob
from pipeline.planner.plan_folder import find_plan_file
from pipeline.training.config import SparseOptimizerConfig
from pipeline.training.precisions import check_batch_fits_comms

CPU_FUSED_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


def validate_job(job: TrainJob, world_size: int) -> list[Table]:
    """Local, reads dataset.json only. The tables that the job will train on `world_size` ranks.

    Raises:
        ValueError: the data set is missing or too small, or tables, model, batch, ranks, collectives, optimizer
            or plan file do not fit it or each other.
    """
    dataset = _load(job)
    check_multi_hot(dataset, job.data.synthetic_multi_hot)
    tables = resolve_tables(job.tables, dataset, job.data.synthetic_multi_hot)
    job.model.check_tables(tables, len(dataset.dense_features))
    _check_batches(job, dataset, world_size)
    check_batch_fits_comms(job.comms, job.trainer.global_batch_size // world_size, tables)
    if job.hardware.compute_device == "cpu":
        check_optimizer_on_cpu(job.optimizer.sparse, tables)
    if job.planner.kind == "file":
        find_plan_file(job.planner.plan_file, f"python -m pipeline.plan <this job's overrides> world_size={world_size}")
    return tables


def _load(job: TrainJob) -> Dataset:
    path = job.data.path
    if not storage.is_file(storage.join(path, FILE_NAME)):
        raise ValueError(
            f"there is no {FILE_NAME} in {path!r}: prepare the data set with "
            f"`python -m pipeline.prepare data={job.data.name} source=<file, folder or glob>`, or set data.path"
        )
    return load_dataset(path)


def _check_batches(job: TrainJob, dataset: Dataset, world_size: int) -> None:
    trainer, num_streams = job.trainer, job.data.reader.num_streams
    check_batch_geometry(trainer.global_batch_size, num_streams, world_size)
    if trainer.evaluate_batch_size is not None:
        check_batch_geometry(trainer.evaluate_batch_size, num_streams, world_size)
    check_split(dataset, "train", trainer.global_batch_size * trainer.gradient_accumulation_steps)
    check_split(dataset, "validation", 1)


def check_optimizer_on_cpu(optimizer: SparseOptimizerConfig, tables: list[Table]) -> None:
    """Raises ValueError for what FBGEMM lacks, or ignores, in tables that are sharded on CPU."""
    sharded = [table for table in tables if table.sharding.sharding_types != ["data_parallel"]]
    if not sharded:
        return
    named = f"{len(sharded)} of {len(tables)} tables, {sharded[0].name!r} first,"
    if optimizer.name not in CPU_FUSED_OPTIMIZERS:
        raise ValueError(
            f"optimizer.sparse.name={optimizer.name}, but on CPU FBGEMM updates sharded tables by "
            f"{', '.join(CPU_FUSED_OPTIMIZERS)} only, and {named} may be sharded; use one of these, or set "
            "tables.default.sharding.sharding_types=[data_parallel], which is exact, or train on a GPU"
        )
    if optimizer.weight_decay:
        raise ValueError(
            f"optimizer.sparse.weight_decay={optimizer.weight_decay:g}, but on CPU FBGEMM ignores it in sharded tables, "
            f"and {named} may be sharded; set it to 0, or train on a GPU"
        )


def validate_evaluation(job: EvaluateJob, trained: TrainJob, world_size: int) -> None:
    """Raises ValueError where the run's batches cannot be dealt to `world_size` ranks."""
    size = job.global_batch_size or trained.trainer.global_batch_size
    check_batch_geometry(size, trained.data.reader.num_streams, world_size)
