"""Open the checkpoints of a run folder, resume from them, or start warm from the checkpoints of
another run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.checkpoint.retention import best_step as best_of
from pipeline.checkpoint.steps import list_steps, read_manifest, step_path
from pipeline.config.jobs.evaluate import EvaluateJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import from_extra
from pipeline.config.saved_jobs import job_from_yaml, load_saved_job, load_saved_values
from pipeline.config.tables import TableConfig
from pipeline.config.training import CheckpointConfig, ParallelConfig, WarmStartConfig
from pipeline.data.dataset import Dataset
from pipeline.embeddings.physical import physical_tables, signatures
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.masking import without_hidden
from pipeline.runtime.storage import signature, storage
from pipeline.runtime.storage.signature import requiring
from pipeline.training.preflight import check_data_order, checkpoint_folder

if TYPE_CHECKING:
    from torch import nn
    from torchrec.optim.keyed import KeyedOptimizer

    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.checkpoint.tables import Replicas
    from pipeline.checkpoint.warm_start import NewData
    from pipeline.data.dataset import Dataset
    from pipeline.runtime.process.distributed import DistributedContext
    from pipeline.training.optimizer import TrainingOptimizer
    from pipeline.training.sharded_model import ShardedModel


def config_of(run: str) -> TrainJob | None:
    """Return the config that another run has saved, None if there is none. Raises TrainingError if
    the file is not a job."""
    path = storage.join(run, "config.yaml")
    return load_saved_job(TrainJob, path) if storage.is_file(path) else None


def load_trained_job(job: EvaluateJob) -> TrainJob:
    """Return the run's config with the settings of an evaluation. Raises ConfigError if its model lacks one of job.metrics."""
    path = storage.join(job.run, "config.yaml")
    if not storage.exists(path):
        raise TrainingError(f"{job.run} is not a run folder: {path} is missing; set run=<the run_dir of a training>")
    trained = load_saved_job(TrainJob, path)
    with requiring(job.require_signature):
        trained = as_signed(job.run, trained, chosen_step(job.run, trained, job.step, job.which))
    return replace(
        trained,
        planner=replace(trained.planner, kind="search"),  # its plan file may be for other ranks
        trainer=replace(trained.trainer, metrics=list(dict.fromkeys([*trained.trainer.metrics, *job.metrics]))),
        parallel=ParallelConfig() if job.tables == "averaged" else trained.parallel,
        world_size=job.world_size,
        run_dir=job.run,  # it may have been moved
        data=replace(trained.data, path=job.data_path or trained.data.path),
    )


def as_signed(run: str, job: TrainJob, step: int | None) -> TrainJob:
    """Return the config that the signed manifest of a step holds; `job` if no signature is
    required. config.yaml is not signed: whoever may write to the run folder could change the model
    by it. `step` None means the newest one. Raises DamagedError as read_manifest() does."""
    folder = checkpoint_folder(run, job.checkpoint)
    steps = list_steps(folder) if signature.is_required() else []
    if not steps:
        return job
    manifest = read_manifest(step_path(folder, steps[-1] if step is None else step))
    return job_from_yaml(TrainJob, yaml.safe_dump(manifest.get("config", {})))


def folder_of(run: str) -> str:
    """Return the checkpoint folder of another run by its saved config, also without the run's
    plugins. Raises ConfigError if the file is not a saved job."""
    path = storage.join(run, "config.yaml")
    section = load_saved_values(path).get("checkpoint") if storage.is_file(path) else None
    folder = section.get("folder") if isinstance(section, dict) else None
    return checkpoint_folder(run, CheckpointConfig(folder=folder))


def best_step(run: str, job: TrainJob) -> tuple[int, dict[str, Any]] | None:
    """Return the best step of the run in folder `run`, and its metrics; None if the run keeps no best step."""
    return best_of(checkpoint_folder(run, job.checkpoint), job.best_metric) if job.checkpoint.num_best else None


def chosen_step(run: str, job: TrainJob, step: int | None, which: str) -> int | None:
    """Return the step that an evaluate or export job chooses by `step` and `which`; None means the
    newest intact step. Raises TrainingError if which=best, and no step of the run was evaluated
    when it was saved."""
    if step is not None or which == "last" or (which == "auto" and not job.checkpoint.num_best):
        return step
    best = best_of(checkpoint_folder(run, job.checkpoint), job.best_metric)
    if best is None and which == "best":
        raise TrainingError(
            f"which=best, but no checkpoint of {run} was evaluated at the step that it holds: train with "
            "checkpoint.save_best=true, or take which=last"
        )
    return None if best is None else best[0]


def describe_saved(job: TrainJob) -> str:
    """Say what an interrupted training has saved, and what to do next."""
    from pipeline.checkpoint.steps import list_steps

    folder = checkpoint_folder(job.run_dir, job.checkpoint)
    steps = list_steps(folder) if storage.is_local(folder) else []
    if steps:
        return f"{job.run_dir} holds step {steps[-1]}: run the same command again to resume from it"
    if storage.is_local(folder):
        return f"nothing is saved in {folder}: the same command starts from the beginning"
    return f"run the same command again to resume from the newest step in {folder}"


def earlier_tables(job: TrainJob) -> dict[str, TableConfig]:
    """Return the tables of the run that this job resumes, {} for a new run folder."""
    earlier = config_of(job.run_dir) if job.checkpoint.resume else None
    return earlier.tables if earlier else {}


def describe_job(job: TrainJob, dataset: Dataset, data_order: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the run that each checkpoint records. Steps of one run have equal
    hashes."""
    config = without_hidden(asdict(job))  # as config.yaml has it
    hashes = {
        "config": _hash(config),
        "schema": dataset.schema_hash(),
        "plan": _hash(plan["plan"]),
        "plan_fingerprint": plan["fingerprint_sha256"],
    }
    # In the order in which the layers read them.
    features = {"dense": dataset.dense_features, "sparse": dataset.sparse_feature_names}
    return {"data_order": data_order, "config": config, "plan": plan, "hashes": hashes, "features": features}


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _has_tiers(model: nn.Module) -> bool:
    """Return True if a table has tiers: a copy of it in memory could need more than the memory that
    tiers leave free."""
    from pipeline.sharding.torchrec.sharder import ShardedTables

    return any(module.has_tiers for module in model.modules() if isinstance(module, ShardedTables))


def open_checkpoints(
    job: TrainJob,
    model: nn.Module,
    optimizer: TrainingOptimizer,
    context: DistributedContext,
    about: dict[str, Any],
    fence: Callable[[], None] | None,
    replicas: Replicas | None = None,
) -> Checkpointer:
    """Open the run's checkpoints by checkpoint.*. `fence` raises if another run has taken the run
    folder."""
    from pipeline.checkpoint.checkpointer import Checkpointer

    differential = None
    if job.checkpoint.differential:
        differential = from_extra("differential_saves", "checkpoint.differential")(
            model, optimizer.replicated, job.checkpoint
        )
    return Checkpointer(
        checkpoint_folder(job.run_dir, job.checkpoint),
        model,
        optimizer,
        context,
        keep_last_n=job.checkpoint.keep_last_n,
        keep_best_n=job.checkpoint.num_best,
        best_metric=job.best_metric,
        asynchronous=job.checkpoint.asynchronous and not _has_tiers(model),
        staging=f"{job.run_dir}/staging",
        average_row_state=job.checkpoint.row_state_across_columns == "average",
        about=about,
        fence=fence,
        replicas=replicas,
        differential=differential,
    )


def resume(
    job: TrainJob,
    checkpointer: Checkpointer,
    data_order: dict[str, Any],
    compression: dict[str, str],
    grow: Callable[[str], None] | None = None,
) -> dict[str, Any] | None:
    """Restore the newest intact step. Return its manifest, None for a new run folder. Collective.
    `grow` is passed to Checkpointer.restore_latest. Raises TrainingError if the run folder holds a
    run on other data or with another compression of tables, or it holds a run and
    checkpoint.resume=false."""
    from pipeline.checkpoint.steps import list_steps

    if not job.checkpoint.resume:
        if steps := list_steps(checkpointer.folder):
            raise TrainingError(
                f"checkpoint.resume=false, but {checkpointer.folder} holds {len(steps)} checkpoint(s), the newest at "
                f"step {steps[-1]}; choose another run_dir, or delete that folder"
            )
        return None

    def check(manifest: dict[str, Any]) -> None:
        check_data_order(job.run_dir, data_order, manifest)
        before = manifest.get("compression", {})
        for table in sorted(before.keys() | compression.keys()):
            if (then := before.get(table, "whole")) != (now := compression.get(table, "whole")):
                raise TrainingError(
                    f"{job.run_dir} was trained to step {manifest['step']} with table {table!r} as {then}, this job has {now}: "
                    "its rows would mean other ids; keep tables.*.compression, or choose another run_dir"
                )

    manifest: dict[str, Any] | None = checkpointer.restore_latest(check, grow)
    checkpointer.clear_after(manifest["step"] if manifest else -1)
    return manifest


def start_warm(
    job: TrainJob,
    config: WarmStartConfig,
    assembly: ShardedModel,
    optimizer: KeyedOptimizer,
    context: DistributedContext,
    dataset: Dataset,
) -> None:
    """Load the initial weights from another run. The log and warm_start.json report what was done
    with each table. Collective. Tables that the other run does not fill completely are initialized
    first. Raises TrainingError if there is no such checkpoint, or a policy of `config` refuses its
    content."""
    from pipeline.checkpoint.warm_start import report_json, warm_start
    from pipeline.runtime.logs import get_logger, to_json

    folder = None if config.run is None else folder_of(config.run)
    data = _new_data(job, assembly, dataset)
    initialize = initializer(job, assembly, dataset)
    report = warm_start(config, folder, assembly.model, optimizer, context, data, initialize)
    for line in report.lines():
        get_logger("pipeline.train").info("%s", line)
    if context.is_main:
        storage.publish_text(f"{job.run_dir}/warm_start.json", to_json(report_json(report), indent=1))


def table_grower(
    job: TrainJob,
    assembly: ShardedModel,
    optimizer: KeyedOptimizer,
    context: DistributedContext,
    dataset: Dataset,
) -> Callable[[str], None]:
    """Return a collective function that restores a step whose tables have fewer rows and
    initializes the new rows. The function raises CheckpointError if anything except the numbers of
    rows differs."""

    def grow(path: str) -> None:
        from pipeline.checkpoint.warm_start import warm_start
        from pipeline.runtime.logs import get_logger

        config = WarmStartConfig(
            checkpoint=path,
            ids="keep",
            new_tables="refuse",
            dropped_tables="refuse",
            shrunk_tables="refuse",
            retyped_tables="refuse",
        )
        data, initialize = _new_data(job, assembly, dataset), initializer(job, assembly, dataset)
        report = warm_start(config, None, assembly.model, optimizer, context, data, initialize)
        grown = [f"{each.table} to {each.rows:,}" for each in report.tables if each.rows_loaded < each.rows]
        get_logger("pipeline.train").info("tables have grown: %s rows", ", ".join(grown))

    return grow


def _new_data(job: TrainJob, assembly: ShardedModel, dataset: Dataset) -> NewData:
    from pipeline.checkpoint.warm_start import NewData
    from pipeline.data.targets import targets_of
    from pipeline.models.build import find_layers_by_feature

    by_name = {table.name: table for table in assembly.tables}
    parts = {part.name: part.whole_name for part in physical_tables(assembly.tables)}
    return NewData(
        dataset,
        job.data.path,
        {name: by_name[whole].feature_names for name, whole in [*parts.items(), *((name, name) for name in by_name)]},
        {name: whole for name, whole in parts.items() if name != whole},
        signatures(assembly.tables),
        lambda: find_layers_by_feature(
            job.model,
            assembly.tables,
            len(dataset.dense_features),
            targets_of(job.data.columns, dataset, job.model.learns_all),
        ),
    )


def initializer(job: TrainJob, assembly: ShardedModel, dataset: Dataset) -> Callable[[Collection[str] | None], None]:
    """Return a function that initializes the tables with the given names, None: all. Vectors of
    tables.*.init.file replace initial rows; the function raises UserError if a file does not fit."""
    from pipeline.sharding.torchrec.table_init import initialize_tables

    # The values of a part belong to the features of the whole table.
    whole = {table.name: table for table in assembly.tables}
    with_file = [
        replace(
            part, feature_names=whole[part.whole_name].feature_names, compression=whole[part.whole_name].compression
        )
        for part in physical_tables(assembly.tables)
        if part.init.file is not None
    ]
    fill = from_extra("fill_from_files", "tables.*.init.file") if with_file else None

    def initialize(names: Collection[str] | None = None) -> None:
        initialize_tables(assembly.model, job.trainer.seed, names)
        if fill and (wanted := [table for table in with_file if names is None or table.name in names]):
            fill(assembly.model, wanted, dataset, job.data.path, job.run_dir)

    return initialize
