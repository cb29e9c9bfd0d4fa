"""Resolve a train job and build its sharded model and its readers, the same way for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline import devices
from pipeline.config.jobs.train import TrainJob
from pipeline.config.planner import PlannerConfig
from pipeline.config.saved_jobs import load_saved_job
from pipeline.config.tables import TableConfig
from pipeline.data.dataset import Dataset, check_group
from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from pipeline.devices.cpu.products import FastLinear, speed_up_linear_layers
from pipeline.devices.cpu.stack import speed_up_stacks
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.table import Table
from pipeline.models.build import build_model
from pipeline.models.layers.dlrm import join_lookups_to_products, use_torchrec_layers
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.planner.constraints import TableOptimizer
from pipeline.planner.estimator import dense_part_bytes
from pipeline.planner.hardware import Hardware, available_memory, resolve_hardware
from pipeline.planner.head_rows import choose_heads
from pipeline.planner.limits import check_batch_fits_comms, check_host_copy
from pipeline.planner.plan_forecast import step_cost_of
from pipeline.planner.plan_record import PlanRecord
from pipeline.planner.planner import load_or_search_plan
from pipeline.planner.resolved_job import ResolvedJob, resolve_job
from pipeline.planner.tier_slots import SlotChoice, choose_slots, room_for_tiers
from pipeline.runtime.errors import PlanError, TrainingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage
from pipeline.sharding.torchrec.embedding_sync import replicates
from pipeline.sharding.torchrec.sharding import join_hosts, make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.preflight import table_optimizer_of
from pipeline.training.tier_rates import tier_folder

logger = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Assembly:
    """`task` is the module inside `model`; `tables` are the logical tables that it uses."""

    tables: list[Table]
    task: TaskModel
    model: DistributedModelParallel
    plan: PlanRecord
    replicated: bool = False  # each host has tables of its own, by a plan for its ranks


def resolve(
    job: TrainJob, dataset: Dataset, context: DistributedContext, earlier: dict[str, TableConfig] | None = None
) -> ResolvedJob:
    """Collective: the same on all ranks; rank 0 chooses the rows of a head that is `auto`, and tiers that are.

    earlier: the tables of the run that is resumed, whose numbers of head rows stay.
    """

    def hardware() -> Hardware:
        return resolve_hardware(
            job.hardware,
            context.world_size,
            local_world_size=context.local_world_size,
            device_type=devices.current().device_type,
        )

    def choose(tables: list[Table], auto: list[Table]) -> dict[str, int]:
        def decide() -> dict[str, int]:
            room = available_memory(job.planner, hardware())
            return choose_heads(job, tables, auto, dataset, context.world_size, room, earlier)

        return _decided(context, decide)

    def choose_tiers(whole: ResolvedJob) -> SlotChoice:
        return _decided(context, lambda: slots_for(whole, hardware()))

    return resolve_job(job, dataset, context.world_size, choose, choose_tiers)


def _decided(context: DistributedContext, decide: Callable[[], T]) -> T:
    """Collective: what rank 0 decides. Raises TrainingError on all where it cannot."""
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


def slots_for(whole: ResolvedJob, hardware: Hardware) -> SlotChoice:
    """Which tables have tiers on this hardware, and how many slots (sharding.tiers=auto).

    Raises:
        PlanError: GPU ranks, or memory that does not hold the fewest slots.
    """
    job = whole.job
    if not hardware.on_cpu:
        raise PlanError(
            f"sharding.tiers=auto is for CPU ranks, and these are {hardware.compute_device}: leave it out, and use "
            "tables.default.sharding.compute_kernels=[fused_uvm_caching]"
        )
    task = build_task(whole, hardware.compute_device)
    modules = [module for module in task.modules() if isinstance(module, EmbeddingBagCollection)]
    dense = dense_part_bytes(task, [parameter for module in modules for parameter in module.parameters()])
    room = room_for_tiers(hardware.ddr_cap_bytes, job.planner.reserved_memory_fraction, dense, hardware.world_size)
    return choose_slots(job, whole.tables, room, hardware.world_size)


def build_task(resolved: ResolvedJob, compute_device: str) -> TaskModel:
    """The model with its loss, tables on meta, the sparse optimizer attached to them. compute_device may be auto."""
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


def assemble(resolved: ResolvedJob, context: DistributedContext, initialize: bool = True) -> Assembly:
    """Collective: build, plan, shard, initialize; without `initialize` a checkpoint is to fill the tables."""
    job, plain = resolved.job, resolved.plain_tables
    for report in resolved.head_reports if context.world_size > 1 else []:
        logger.info("table %s: %s", report.table, report.note())
    _warn_of_mixed_vocabularies(resolved.tables, resolved.dataset)
    replicated = replicates(job.parallel, context)
    batch_size = job.trainer.micro_batch_size // context.world_size
    check_batch_fits_comms(job.comms, batch_size, plain)
    task = build_task(resolved, devices.current().device_type)
    if any(isinstance(module.forward, FastLinear) for module in task.modules()):
        logger.info("layers      fp32 products by oneDNN, for MKL multiplies at half of this CPU's rate")
    sharders = make_sharders(job.comms, job.trainer.seed)
    sparse = job.optimizer.sparse
    record = load_or_search_plan(
        job.planner,
        job.hardware,
        plain,
        task,
        sharders,
        optimizer=TableOptimizer(sparse.name, sparse.weight_decay),
        batch_size=batch_size,
        context=context,
        num_ranks=context.local_world_size if replicated else None,
        earlier=_plan_of_run(job),
        step_cost=partial(step_cost_of, resolved, threads=torch.get_num_threads()),
    )
    if job.checkpoint.asynchronous and devices.current().has_own_memory:
        check_host_copy(record.ranks, record.usable_ddr_bytes, record.dense_bytes)
    join_hosts(record.fingerprint["topology"].get("hosts_per_nvlink_domain", 1))
    model = shard_model(
        task,
        record.plan,
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
    return Assembly(resolved.tables, task, model, record, replicated)


def _tier_folder(job: TrainJob, tables: list[Table], replicated: bool) -> str | None:
    """Where rows of tables with tiers lie; None where there are no such tables. Raises TrainingError."""
    names = [table.config_name for table in tables if table.tiers is not None]
    if not names:
        return None
    if replicated:
        raise TrainingError(
            f"tables.{names[0]}.tiers with parallel.embedding_sync={job.parallel.embedding_sync}: hosts' own tables are averaged "
            "in memory; use every_step, or leave tiers out"
        )
    return tier_folder(job, names[0])


def _plan_of_run(job: TrainJob) -> str | None:
    """The plan file of the run that goes on, where it was planned by the same settings; whether it holds, planning says."""
    path, config = f"{job.run_dir}/plan.json", f"{job.run_dir}/config.yaml"
    if not (job.checkpoint.resume and storage.is_file(path) and storage.is_file(config)):
        return None
    before, now = (_what_is_searched(each) for each in (load_saved_job(TrainJob, config), job))
    if before != now:
        logger.info("plan        a new search, for the settings of planner are not those of %s", config)
        return None
    return path


def _what_is_searched(job: TrainJob) -> PlannerConfig:
    """The settings that a plan depends on. A plan from a file is the run's plan by now, as one that was searched is."""
    kind = "search" if job.planner.kind == "file" else job.planner.kind
    return replace(job.planner, plan_file="", kind=kind)


def _warn_of_mixed_vocabularies(tables: list[Table], dataset: Dataset) -> None:
    """Features that share a table share its rows, so the same id should mean the same value."""
    for table in tables:
        features = [dataset.sparse_feature(name) for name in table.feature_names]
        owners = {(each.sequence and each.sequence.shares) or each.name for each in features}
        if len({(feature.hash_size, feature.hash_seed) for feature in features}) > 1 or (
            len(owners) > 1 and features[0].hash_size is None
        ):
            logger.warning(
                "features %s share table %r, but each has a vocabulary of its own: the same row stands for different "
                "values; prepare them with ids.kind=hash, one hash_size and one hash_seed",
                ", ".join(table.feature_names),
                table.name,
            )


def open_reader(
    resolved: ResolvedJob,
    split: str,
    context: DistributedContext,
    global_batch_size: int | None = None,
    every_row: bool = False,
) -> ShardReader:
    """Training reads whole micro-batches; the other splits are read in evaluation batches, every row once. With
    `every_row` so is the training split, which then may end in a batch that is not full.

    The order of an evaluation does not depend on trainer.seed: the first batches of a split are the same rows for all runs.
    """
    job, trainer, training = resolved.job, resolved.job.trainer, split == "train"
    check_group(resolved.dataset, job.data.group_column)
    default = trainer.micro_batch_size if training else trainer.evaluate_batch_size or trainer.global_batch_size
    return ShardReader(
        job.data.path,
        resolved.dataset,
        split,
        global_batch_size=global_batch_size or default,
        rank=context.rank,
        world_size=context.world_size,
        config=job.data.reader,
        seed=trainer.seed if training and not every_row else 0,
        multi_hot=job.data.synthetic_multi_hot,
        drop_last=training and not every_row,
        with_groups=not training or every_row,
        pin=pinned if devices.current().copies_batches else None,
        split_ids=IdSplitter(resolved.all_tables, skip_empty_bags=context.world_size > 1),
        targets=resolved.targets,
        quarantine_path=f"{job.run_dir}/quarantine/{split}.rank{context.rank}.jsonl",
    )


def pinned(batch: Batch) -> Batch:
    """Copy a batch to pinned memory, on any thread: a new thread's device is the host's first, not this rank's."""
    devices.current().start()
    return batch.pin_memory()
