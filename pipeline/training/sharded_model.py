"""Resolve a job, build its model with its loss on meta tensors, plan its tables and shard it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from pipeline import devices
from pipeline.checkpoint.tables import Replicas
from pipeline.config.jobs.train import TrainJob
from pipeline.config.planner import PlannerConfig
from pipeline.config.registry import from_extra, if_installed
from pipeline.config.saved_jobs import load_saved_job
from pipeline.config.tables import TableConfig
from pipeline.config.training import ParallelConfig
from pipeline.data.dataset import Dataset
from pipeline.devices.cpu.products import FastLinear, speed_up_linear_layers
from pipeline.embeddings.limits import check_batch_fits_comms
from pipeline.embeddings.table import Table
from pipeline.models.build import build_model
from pipeline.models.layers.dlrm import join_lookups_to_products, use_torchrec_layers
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.planner.hardware import Hardware, available_memory, resolve_hardware
from pipeline.planner.plan_record import PlanRecord, RankLoad
from pipeline.planner.planner import load_or_search_plan
from pipeline.planner.request import TableOptimizer, cost_of_steps
from pipeline.planner.resolved_job import SPLIT_KEY, ResolvedJob, resolve_job
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.errors import PlanError, TrainingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage
from pipeline.sharding.torchrec.sharding import join_hosts, make_sharders, replicates, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.preflight import table_optimizer_of

logger = get_logger(__name__)

T = TypeVar("T")


def resolve(
    job: TrainJob, dataset: Dataset, context: DistributedContext, earlier: dict[str, TableConfig] | None = None
) -> ResolvedJob:
    """Return the same resolved job on all ranks. Rank 0 chooses `head_rows: auto` and
    `sharding.tiers: auto`. Collective. `earlier` holds the tables of the run that this job resumes;
    their head rows do not change."""

    def hardware() -> Hardware:
        return resolve_hardware(
            job.hardware,
            context.world_size,
            local_world_size=context.local_world_size,
            device_type=devices.current().device_type,
        )

    def choose(tables: list[Table], auto: list[Table]) -> dict[str, int]:
        def decide() -> dict[str, int]:
            choose_heads = from_extra("choose_heads", SPLIT_KEY)
            room = available_memory(job.planner, hardware())
            heads: dict[str, int] = choose_heads(job, tables, auto, dataset, context.world_size, room, earlier)
            return heads

        return _broadcast_from_rank0(context, decide)

    def choose_tiers(whole: ResolvedJob) -> Any:
        slots_for = from_extra("slots_for", "sharding.tiers=auto")
        return _broadcast_from_rank0(context, lambda: slots_for(whole, hardware()))

    return resolve_job(job, dataset, context.world_size, choose, choose_tiers)


def _broadcast_from_rank0(context: DistributedContext, decide: Callable[[], T]) -> T:
    """Return rank 0's decision on all ranks. Raises TrainingError on all ranks if rank 0 fails.
    Collective."""
    message: list[Any] = [None, ""]
    if context.is_main:
        try:
            message[0] = decide()
        except UserError as error:
            message[1] = str(error)
    if context.world_size > 1:
        dist.broadcast_object_list(message, src=0, device=context.device)
    if message[1]:
        raise TrainingError(message[1])
    decision: T = message[0]
    return decision


def build_task(resolved: ResolvedJob, compute_device: str) -> TaskModel:
    """Return the model with its loss. Its tables are on meta and carry the sparse optimizer.
    `compute_device` may be auto."""
    job, trainer = resolved.job, resolved.job.trainer
    device = devices.named(compute_device, plain=not job.sharding.fast_cpu)
    device.use_tf32(trainer.precision == "tf32")
    num_dense = len(resolved.dataset.dense_features)
    model = build_model(job.model, resolved.tables, num_dense, seed=trainer.seed, targets=resolved.targets)
    if device.has_torchrec_layers:
        use_torchrec_layers(model)
    elif device.has_kernels and trainer.precision == "fp32":
        if (speed_up_stacks := if_installed("speed_up_stacks")) is not None:
            speed_up_stacks(model)
        speed_up_linear_layers(model)
    task = make_task(
        job.model,
        model,
        resolved.tables,
        resolved.targets,
        precision=trainer.precision,
        loss=trainer.loss,
        rows_per_stream=trainer.micro_batch_size // job.data.reader.num_streams,
    )
    updates = {table.name: table.updates for table in resolved.plain_tables}
    apply_sparse_optimizer(task, table_optimizer_of(job, compute_device), updates)
    return task


def plan_tables(resolved: ResolvedJob, task: TaskModel, context: DistributedContext) -> PlanRecord:
    """Return the same plan on all ranks. Hosts with separate tables plan for their own ranks.
    Collective. Raises PlanError if the tables, or the host memory of asynchronous saves, do not fit
    the hardware."""
    job, plain = resolved.job, resolved.plain_tables
    for report in resolved.head_reports if context.world_size > 1 else []:
        logger.info("table %s: %s", report.table, report.note())
    _warn_of_mixed_vocabularies(resolved.tables, resolved.dataset)
    batch_size = job.trainer.micro_batch_size // context.world_size
    check_batch_fits_comms(job.comms, batch_size, plain)
    sparse = job.optimizer.sparse
    record = load_or_search_plan(
        job.planner,
        job.hardware,
        plain,
        task,
        make_sharders(job.comms, job.trainer.seed),
        optimizer=TableOptimizer(sparse.name, sparse.weight_decay),
        batch_size=batch_size,
        context=context,
        num_ranks=context.local_world_size if replicates(job.parallel, context) else None,
        earlier=_plan_of_run(job),
        step_cost=partial(cost_of_steps, resolved, threads=torch.get_num_threads()),
    )
    if job.checkpoint.asynchronous and devices.current().has_own_memory:
        check_host_copy(record.ranks, record.usable_ddr_bytes, record.dense_bytes)
    return record


def _plan_of_run(job: TrainJob) -> str | None:
    """Return the plan file of the run that this job resumes, or trains again, if the planner's
    settings are the same."""
    runs = [*([job.run_dir] if job.checkpoint.resume else []), *([job.from_run] if job.from_run else [])]
    found = ((storage.join(run, "plan.json"), storage.join(run, "config.yaml")) for run in runs)
    path, config = next((pair for pair in found if all(map(storage.is_file, pair))), (None, ""))
    if path is None:
        return None
    before, now = (_search_settings(each) for each in (load_saved_job(TrainJob, config), job))
    if before != now:
        logger.info("plan        searching again because the settings of planner differ from %s", config)
        return None
    return path


def _search_settings(job: TrainJob) -> PlannerConfig:
    """Return the settings that a plan depends on. A plan read from a file counts as a searched plan."""
    kind = "search" if job.planner.kind == "file" else job.planner.kind
    return replace(job.planner, plan_file="", kind=kind)


def _warn_of_mixed_vocabularies(tables: list[Table], dataset: Dataset) -> None:
    """Warn of features that share a table but give its rows different meanings."""
    for table in tables:
        features = [dataset.sparse_feature(name) for name in table.feature_names]
        owners = {(each.sequence and each.sequence.shares) or each.name for each in features}
        if len({(feature.hash_size, feature.hash_seed) for feature in features}) > 1 or (
            len(owners) > 1 and features[0].hash_size is None
        ):
            logger.warning(
                "features %s share table %r, but not a vocabulary: the same row means different "
                "values; prepare them with ids.kind=hash, one hash_size and one hash_seed",
                ", ".join(table.feature_names),
                table.name,
            )


def check_host_copy(ranks: Sequence[RankLoad], usable_ddr_bytes: int, dense_bytes: int) -> None:
    """Check that host memory holds the copy of a GPU's tables and layers which an asynchronous save
    writes from. Raises PlanError if a rank's copy and its tables in host memory exceed
    `usable_ddr_bytes`."""
    for rank, load in enumerate(ranks):
        copied = load.hbm_bytes + dense_bytes
        if copied + load.ddr_bytes > usable_ddr_bytes:
            raise PlanError(
                f"checkpoint.asynchronous=true keeps a copy of rank {rank}'s {show_bytes(copied)} of GPU memory in host "
                f"memory, where {show_bytes(max(0, usable_ddr_bytes - load.ddr_bytes))} are left; "
                "use checkpoint.asynchronous=false, or raise hardware.ddr_cap_gb"
            )


@dataclass(frozen=True)
class ShardedModel:
    """A sharded model. `task` is the module inside `model`; `tables` are its logical tables.
    `replicated`: each host has separate tables, by a plan for its own ranks."""

    tables: list[Table]
    task: TaskModel
    model: DistributedModelParallel
    plan: PlanRecord
    replicated: bool = False


def build_sharded_model(resolved: ResolvedJob, context: DistributedContext, initialize: bool = True) -> ShardedModel:
    """Build, plan and shard a model. Without `initialize` the caller must fill the tables.
    Collective."""
    task = build_task(resolved, devices.current().device_type)
    return shard(resolved, task, plan_tables(resolved, task, context), context, initialize)


def shard(
    resolved: ResolvedJob, task: TaskModel, plan: PlanRecord, context: DistributedContext, initialize: bool = True
) -> ShardedModel:
    """Wrap `task` in DistributedModelParallel by `plan` and allocate the tables on the rank's
    device. Collective."""
    job, plain = resolved.job, resolved.plain_tables
    if any(isinstance(module.forward, FastLinear) for module in task.modules()):
        logger.info("layers      fp32 products by oneDNN: MKL multiplies at half of this CPU's rate")
    replicated = replicates(job.parallel, context)
    join_hosts(plan.fingerprint["topology"].get("hosts_per_nvlink_domain", 1))
    model = shard_model(
        task,
        plan.plan,
        job.comms,
        context,
        seed=job.trainer.seed,
        tables=plain,
        replicated=replicated,
        initialize=initialize,
        tier_folder=_tier_folder(job, plain, replicated),
    )
    if context.world_size == 1 and devices.current().has_kernels:
        join_lookups_to_products(model)
    return ShardedModel(resolved.tables, task, model, plan, replicated)


def open_replicas(
    sharded: ShardedModel,
    optimizer: KeyedOptimizer | None,
    config: ParallelConfig,
    context: DistributedContext,
) -> Replicas | None:
    """Return the tables that each host trains for itself; None if all hosts share their tables."""
    if not sharded.replicated:
        return None
    made: Replicas = from_extra("table_replicas", "parallel.embedding_sync")(sharded.model, optimizer, config, context)
    return made


def _tier_folder(job: TrainJob, tables: list[Table], replicated: bool) -> str | None:
    """Return the local folder for the rows that tables with tiers do not keep in memory. Return
    None if no table has tiers (`tables.<name>.tiers`). Raises TrainingError if hosts have separate
    tables, or the folder is not local."""
    names = [table.config_name for table in tables if table.tiers is not None]
    if not names:
        return None
    if replicated:
        raise TrainingError(
            f"tables.{names[0]}.tiers with parallel.embedding_sync={job.parallel.embedding_sync}: hosts' own tables are averaged "
            "in memory; use every_step, or leave tiers out"
        )
    folder: str = from_extra("tier_folder", f"tables.{names[0]}.tiers")(job, names[0])
    return folder
