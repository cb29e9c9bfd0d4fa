"""Plan where the tables of a run are placed: read the run's plan or a plan file, or search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from pipeline import devices
from pipeline.config.jobs.train import TrainJob
from pipeline.config.planner import PlannerConfig
from pipeline.config.saved_jobs import load_saved_job
from pipeline.data.dataset import Dataset
from pipeline.embeddings.limits import check_batch_fits_comms
from pipeline.embeddings.table import Table
from pipeline.models.tasks.task import TaskModel
from pipeline.planner.constraints import TableOptimizer
from pipeline.planner.plan_record import PlanRecord, RankLoad
from pipeline.planner.planner import load_or_search_plan
from pipeline.planner.request import cost_of_steps
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.byte_counts import show_bytes
from pipeline.runtime.errors import PlanError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage
from pipeline.sharding.torchrec.sharding import make_sharders, replicates

logger = get_logger(__name__)


def plan_tables(resolved: ResolvedJob, task: TaskModel, context: DistributedContext) -> PlanRecord:
    """Return the same plan on all ranks. Hosts with separate tables plan for their own ranks.
    Collective.

    Raises:
        PlanError: the tables, or the host memory of asynchronous saves, do not fit the hardware.
    """
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
    """Return the plan file of the run that this job resumes, if the planner's settings are the same."""
    path, config = f"{job.run_dir}/plan.json", f"{job.run_dir}/config.yaml"
    if not (job.checkpoint.resume and storage.is_file(path) and storage.is_file(config)):
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
    """Check that host memory holds the copy of a GPU's tables and layers which an asynchronous save writes from.

    Raises:
        PlanError: a rank's copy and its tables in host memory exceed `usable_ddr_bytes`.
    """
    for rank, load in enumerate(ranks):
        copied = load.hbm_bytes + dense_bytes
        if copied + load.ddr_bytes > usable_ddr_bytes:
            raise PlanError(
                f"checkpoint.asynchronous=true keeps a copy of rank {rank}'s {show_bytes(copied)} of GPU memory in host "
                f"memory, where {show_bytes(max(0, usable_ddr_bytes - load.ddr_bytes))} are left; "
                "use checkpoint.asynchronous=false, or raise hardware.ddr_cap_gb"
            )
