"""Check a train job against its data set and its run folder, before torch is imported or memory is allocated."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from pipeline.checkpoint.steps import list_steps, read_manifest, step_path
from pipeline.config.data import check_batch_geometry
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.optimizers import SparseOptimizerConfig, all_optimizers, find_optimizer
from pipeline.config.registry import FEATURE
from pipeline.config.tables import expand_patterns, rows_of_features
from pipeline.config.training import CheckpointConfig
from pipeline.data.dataset import FILE_NAME, Dataset, check_multi_hot, check_split, load_dataset
from pipeline.data.prepare.describe_unprepared import describe_dataset
from pipeline.data.raw.layout import columns_of
from pipeline.embeddings.compression.kind import compressed
from pipeline.embeddings.limits import check_batch_fits_comms, check_widths
from pipeline.embeddings.table import Table
from pipeline.planner.plan_record import find_plan_file
from pipeline.planner.resolved_job import ResolvedJob, resolve_job
from pipeline.runtime.errors import DamagedError, TrainingError, did_you_mean
from pipeline.runtime.shell_words import command
from pipeline.runtime.storage import storage


def validate_job(job: TrainJob, world_size: int) -> list[Table]:
    """Return the tables that the job will train on `world_size` ranks. Local: reads only
    dataset.json. A PlanJob may be validated without dataset.json if its config is sufficient; see
    load_or_describe.

    Raises TrainingError if the data set is missing or too small, the run folder holds a run on
    other rows, or tables, model, batch, ranks, collectives, optimizer or plan file do not fit the
    data set or each other.
    """
    dataset = load_or_describe(job)
    if not isinstance(job, PlanJob):
        check_run_folder(job, dataset)
    check_multi_hot(dataset, job.data.synthetic_multi_hot)
    # None of these checks depends on the number of head rows that a run chooses.
    resolved = resolve_job(job, dataset, world_size)
    check_resolved(resolved)
    return resolved.tables


def resolve_alone(job: TrainJob, dataset: Dataset) -> ResolvedJob:
    """Local. Resolve a job that was trained, with the choices that its run stored, for one process."""
    return resolve_job(job, dataset, world_size=1)


def check_resolved(resolved: ResolvedJob) -> None:
    """Check a resolved job as validate_job does, except for the checks of resolve_job. Local.
    Raises TrainingError."""
    job, tables, world_size = resolved.job, resolved.tables, resolved.world_size
    _check_batches(job, resolved.dataset, world_size)
    _check_replicas(job, tables)
    plain = resolved.plain_tables
    if tables and not plain:
        raise TrainingError(
            f"all {len(tables)} tables are tensor trains, so no table is left to shard; keep one table uncompressed, e.g. "
            f"tables.{min(tables, key=lambda table: table.num_embeddings).config_name}.compression.kind=none"
        )
    check_widths(plain)
    check_metric_features(job, resolved.dataset)
    for size in (job.trainer.micro_batch_size, job.trainer.evaluate_batch_size or job.trainer.global_batch_size):
        check_batch_fits_comms(job.comms, size // world_size, plain)
    table_optimizer_of(job, job.hardware.compute_device)
    if job.hardware.compute_device == "cpu":
        check_optimizer_on_cpu(job.optimizer.sparse, plain, job.sharding.fast_cpu)
    if job.planner.kind == "file":
        find_plan_file(job.planner.plan_file, f"python -m pipeline plan <this job's overrides> world_size={world_size}")


def check_metric_features(job: TrainJob, dataset: Dataset) -> None:
    """Raise TrainingError if a metric's name ends in a feature that the data set lacks."""
    known = dataset.sparse_feature_names
    for name in job.trainer.metrics:
        feature = name.partition(FEATURE)[2]
        if feature and feature not in known:
            raise TrainingError(
                f"metrics={name}: {feature!r} is not a categorical feature of data set {dataset.name!r}"
                f"{did_you_mean(feature, known)}; it has {', '.join(known[:20])}"
            )


def load_or_describe(job: TrainJob) -> Dataset:
    """Return dataset.json. Without it, describe the data set of a PlanJob from the config; `splits`
    is then empty. Raises TrainingError if there is no dataset.json and the job trains, or its
    config does not say enough."""
    path = job.data.path
    if storage.is_file(storage.join(path, FILE_NAME)):
        return load_dataset(path)
    if isinstance(job, PlanJob):
        return describe_dataset(job.data, rows_of_features(expand_patterns(job.tables, columns_of(job.data).sparse)))
    raise TrainingError(
        f"there is no {FILE_NAME} in {path!r}: prepare the data set with "
        f"`{command('prepare')} data={job.data.name} source=<file, folder or glob>`, or set data.path"
    )


def _check_replicas(job: TrainJob, tables: list[Table]) -> None:
    if job.parallel.has_replicas and (frozen := [table for table in tables if table.updates.frozen]):
        raise TrainingError(
            f"parallel.embedding_sync={job.parallel.embedding_sync} averages the tables of the hosts, and rounding would change "
            f"the rows of tables.{frozen[0].config_name}.frozen=true; use parallel.embedding_sync=every_step"
        )
    fixed = [table for table in tables if not compressed(table).can_average]
    if job.parallel.has_replicas and fixed:
        raise TrainingError(
            f"parallel.embedding_sync={job.parallel.embedding_sync}, but the rows of tables.{fixed[0].config_name} belong to the "
            f"ids that each host has seen ({compressed(fixed[0]).setting}), and their average would mix ids; use "
            "parallel.embedding_sync=every_step, or another kind for that table"
        )


def check_geometry(job: TrainJob, world_size: int) -> None:
    """Raise ConfigError if the batches cannot be divided among the ranks. Needs no data."""
    trainer, num_streams = job.trainer, job.data.reader.num_streams
    check_batch_geometry(trainer.micro_batch_size, num_streams, world_size)
    if trainer.evaluate_batch_size is not None:
        check_batch_geometry(trainer.evaluate_batch_size, num_streams, world_size)


def check_world_sizes(job: TrainJob, world_sizes: list[int]) -> None:
    """Raise TrainingError if a run could not resume on one of these numbers of ranks. Needs no
    data."""
    numbers = " and ".join(filter(None, [", ".join(map(str, world_sizes[:-1])), str(world_sizes[-1])]))
    if job.planner.kind == "file":
        raise TrainingError(
            f"planner=file: {job.planner.plan_file} is a plan for one number of ranks, and the job may run on {numbers}; leave planner out: "
            "each number of ranks gets its plan when it starts"
        )
    num_streams, common = job.data.reader.num_streams, math.lcm(*world_sizes)
    if bad := [ranks for ranks in world_sizes if num_streams % ranks]:
        streams = common * max(1, round(num_streams / common))
        batch = streams * max(1, round(job.trainer.global_batch_size / streams))
        raise TrainingError(
            f"the job may run on {numbers} ranks, and data.reader.num_streams={num_streams} is not divided by {bad[0]}: give "
            f"data.reader.num_streams={streams} trainer.global_batch_size={batch} (another order of rows, so another run), or other numbers of nodes"
        )
    for ranks in world_sizes:
        check_geometry(job, ranks)


def _check_batches(job: TrainJob, dataset: Dataset, world_size: int) -> None:
    check_geometry(job, world_size)
    if not dataset.splits:
        return
    check_split(dataset, "train", job.trainer.global_batch_size)
    check_split(dataset, "validation", 1)


def table_optimizer_of(job: TrainJob, device_type: str) -> SparseOptimizerConfig:
    """Return the tables' optimizer, with update_rows=auto resolved to touched if only touched rows
    can be updated. `device_type` is auto, cpu or cuda. Raises TrainingError if update_rows=all is
    set, but FBGEMM updates only touched rows, and each micro-batch would count as a step."""
    sparse, accumulation = job.optimizer.sparse, job.trainer.gradient_accumulation_steps
    has_kernel = find_optimizer(sparse.name).cpu_kernel is not None
    reasons = {
        f"hardware.compute_device={device_type}": device_type not in ("cpu", "auto"),
        f"sharding.fast_cpu={str(job.sharding.fast_cpu).lower()}": not job.sharding.fast_cpu,
        "no Numba": find_spec("numba") is None,
        f"optimizer.sparse.name={sparse.name}": not has_kernel,
        f"trainer.gradient_accumulation_steps={accumulation}": accumulation > 1,
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason is None or sparse.update_rows == "touched":
        return sparse
    if sparse.update_rows == "all":
        raise TrainingError(
            f"optimizer.sparse.update_rows=all needs this package's CPU kernels and one batch a step, but there is {reason}; "
            "use update_rows=touched"
        )
    return replace(sparse, update_rows="touched")


def check_optimizer_on_cpu(optimizer: SparseOptimizerConfig, tables: list[Table], fast_cpu: bool = True) -> None:
    """Raise TrainingError for settings that neither FBGEMM nor our kernels support in sharded
    tables on CPU."""
    sharded = [table for table in tables if table.sharding.sharding_types != ["data_parallel"]]
    entry, has_kernels = find_optimizer(optimizer.name), fast_cpu and find_spec("numba") is not None
    if not sharded or (has_kernels and entry.cpu_kernel is not None):
        return
    named = f"{len(sharded)} of {len(tables)} tables, {sharded[0].name!r} first,"
    hint = "train on a GPU" if entry.cpu_kernel is None else "install Numba and set sharding.fast_cpu=true"
    if not entry.fused_on_cpu:
        known = ", ".join(name for name, each in all_optimizers().items() if each.fused_on_cpu)
        raise TrainingError(
            f"optimizer.sparse.name={optimizer.name}, but on CPU FBGEMM updates sharded tables by "
            f"{known} only, and {named} may be sharded; use one of these, or {hint}"
        )
    for name in ("weight_decay", "gradient_clip_value", "gradient_clip_norm"):
        if value := getattr(optimizer, name):
            raise TrainingError(
                f"optimizer.sparse.{name}={value:g}, but on CPU FBGEMM ignores it in sharded tables, "
                f"and {named} may be sharded; leave it out, or {hint}"
            )
    for table in sharded:
        for name in ("l2", "weight_decay"):
            if (value := getattr(table.updates, name)) and not table.updates.frozen:
                raise TrainingError(
                    f"tables.{table.config_name}.{name}={value:g}, but on CPU FBGEMM ignores it in sharded tables; leave it out, "
                    f"or {hint}"
                )


def validate_evaluation(job: EvaluateJob, trained: TrainJob, world_size: int) -> None:
    """Raise TrainingError if the run's batches cannot be divided among `world_size` ranks."""
    trainer = trained.trainer
    size = job.global_batch_size or trainer.evaluate_batch_size or trainer.global_batch_size
    check_batch_geometry(size, trained.data.reader.num_streams, world_size)


def checkpoint_folder(run_dir: str, config: CheckpointConfig) -> str:
    return config.folder or f"{run_dir}/checkpoints"


def describe_data_order(job: TrainJob, dataset_fingerprint: str) -> dict[str, Any]:
    """Return every setting that decides which rows a step trains on. A resumed run must not change
    them."""
    return {
        "dataset": dataset_fingerprint,
        "trainer.seed": job.trainer.seed,
        "trainer.global_batch_size": job.trainer.global_batch_size,
        "trainer.gradient_accumulation_steps": job.trainer.gradient_accumulation_steps,
        "data.reader.num_streams": job.data.reader.num_streams,
        "data.reader.shuffle": job.data.reader.shuffle,
        **({"trainer.overfit_batches": job.trainer.overfit_batches} if job.trainer.overfit_batches else {}),
    }


def check_data_order(run_dir: str, data_order: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Raise TrainingError if this job would read other rows after the manifest's step than the run
    would have read."""
    for key in dict.fromkeys([*data_order, *manifest["data_order"]]):
        now, then = data_order.get(key), manifest["data_order"].get(key)
        if then != now:
            raise TrainingError(
                f"{run_dir} was trained to step {manifest['step']} with {key}={then}, but this job has {now}, so "
                f"it would read other rows after step {manifest['step']}; keep the value, or choose another run_dir"
            )


def check_run_folder(job: TrainJob, dataset: Dataset) -> None:
    """Check the data order against the newest step in a local run folder, before torch is imported.
    Local."""
    folder = checkpoint_folder(job.run_dir, job.checkpoint)
    if not job.checkpoint.resume or not storage.is_local(folder):
        return
    if steps := list_steps(folder):
        with suppress(DamagedError):  # the training falls back to the step before
            manifest = read_manifest(step_path(folder, steps[-1]))
            check_data_order(job.run_dir, describe_data_order(job, dataset.fingerprint()), manifest)
