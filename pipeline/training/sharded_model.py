"""Shard a model by its plan, and initialize its tables."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from pipeline import devices
from pipeline.checkpoint.replicas import Replicas
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import from_extra
from pipeline.config.training import ParallelConfig
from pipeline.devices.cpu.products import FastLinear
from pipeline.embeddings.table import Table
from pipeline.models.layers.dlrm import join_lookups_to_products
from pipeline.models.tasks.task import TaskModel
from pipeline.planner.plan_record import PlanRecord
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.sharding import join_hosts, replicates, shard_model
from pipeline.training.build import build_task
from pipeline.training.plan import plan_tables

logger = get_logger(__name__)


@dataclass(frozen=True)
class ShardedModel:
    """A sharded model. `task` is the module inside `model`; `tables` are its logical tables.

    `replicated`: each host has separate tables, by a plan for its own ranks.
    """

    tables: list[Table]
    task: TaskModel
    model: DistributedModelParallel
    plan: PlanRecord
    replicated: bool = False


def build_sharded_model(resolved: ResolvedJob, context: DistributedContext, initialize: bool = True) -> ShardedModel:
    """Build, plan and shard a model.

    Without `initialize` the caller must fill the tables. Collective.
    """
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
    """Return the folder for rows of tables with tiers, None if no table has tiers.

    Raises:
        TrainingError: hosts have separate tables, or no folder is given.
    """
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
