"""Turn a train job into a sharded model, the same way for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.config.jobs import TrainJob
from pipeline.config.model import used_tables
from pipeline.config.tables import TableConfig
from pipeline.data.dataset import Dataset
from pipeline.data.read.reader import ShardReader
from pipeline.embeddings.compression.id_splitter import IdSplitter
from pipeline.embeddings.compression.physical import physical_tables
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.models.build import build_model
from pipeline.models.layers.dlrm import look_up_where_products_want_it
from pipeline.models.tasks.make_task import Task, make_task
from pipeline.planner.constraints import TableOptimizer
from pipeline.planner.hardware import resolve_hardware, room_for_tables
from pipeline.planner.head_rows import head_reports, is_settled, settle_head_rows, with_notes
from pipeline.planner.planner import load_or_search_plan
from pipeline.planner.record import PlanRecord
from pipeline.runtime.errors import TrainingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.collectives.codecs import check_batch_fits_comms
from pipeline.sharding.torchrec.embedding_sync import replicates
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer

logger = get_logger(__name__)


@dataclass(frozen=True)
class Assembly:
    """`task` is the module inside `model`; `tables` are those that it uses, resolved against the data set, and logical."""

    tables: list[Table]
    task: Task
    model: DistributedModelParallel
    plan: PlanRecord
    replicated: bool = False  # each host has tables of its own, by a plan for its ranks


def build_task(job: TrainJob, tables: list[Table], dataset: Dataset) -> Task:
    """The model with its loss, tables on meta, the sparse optimizer attached to them."""
    trainer = job.trainer
    task = make_task(
        job.model,
        build_model(job.model, tables, len(dataset.dense_features), seed=trainer.seed),
        tables,
        precision=trainer.precision,
        max_non_finite_in_a_row=trainer.max_non_finite_steps if trainer.non_finite_loss != "stop" else 0,
        loss_scale=1.0 / trainer.gradient_accumulation_steps,
    )
    apply_sparse_optimizer(task, job.optimizer.sparse)
    return task


def assemble(job: TrainJob, dataset: Dataset, context: DistributedContext) -> Assembly:
    """Collective: build, plan, shard, initialise."""
    settle_heads(job, dataset, context)
    tables = used_tables(job.model, resolve_tables(job.tables, dataset, job.data.synthetic_multi_hot))
    reports = head_reports(job, tables, dataset, context.world_size)
    for report in reports if context.world_size > 1 else []:
        logger.info("table %s: %s", report.table, report.note())
    tables = with_notes(tables, reports)
    _warn_of_mixed_vocabularies(tables, dataset)
    plain = physical_tables(tables)
    replicated = replicates(job.parallel, context)
    batch_size = job.trainer.micro_batch_size // context.world_size
    check_batch_fits_comms(job.comms, batch_size, plain)
    task = build_task(job, tables, dataset)
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
    )
    model = shard_model(
        task, record.plan, job.comms, context, seed=job.trainer.seed, tables=plain, replicated=replicated
    )
    if context.world_size == 1 and context.device.type == "cpu":
        look_up_where_products_want_it(model)
    return Assembly(tables, task, model, record, replicated)


def settle_heads(
    job: TrainJob, dataset: Dataset, context: DistributedContext, earlier: dict[str, TableConfig] | None = None
) -> None:
    """Collective: every `head_rows: auto` of job.tables becomes a number, the same on all ranks.

    earlier: the tables of the run that goes on; what was chosen for it stays.
    """
    if is_settled(job.tables):
        return
    message: list[Any] = [None, ""]
    if context.is_main:
        try:
            here = resolve_hardware(
                job.hardware,
                context.world_size,
                local_world_size=context.local_world_size,
                device_type=context.device.type,
            )
            message[0] = settle_head_rows(job, dataset, context.world_size, room_for_tables(job.planner, here), earlier)
        except UserError as error:
            message[1] = str(error)
    if context.world_size > 1:
        dist.broadcast_object_list(message, src=0, device=context.device)
    if message[1]:
        raise TrainingError(message[1])
    job.tables = message[0]


def _warn_of_mixed_vocabularies(tables: list[Table], dataset: Dataset) -> None:
    """Features that share a table share its rows, so the same id should mean the same value."""
    for table in tables:
        features = [dataset.sparse_feature(name) for name in table.feature_names]
        if len({(feature.hash_size, feature.hash_seed) for feature in features}) > 1 or (
            len(features) > 1 and features[0].hash_size is None
        ):
            logger.warning(
                "features %s share table %r, but each has a vocabulary of its own: the same row stands for different "
                "values; prepare them with ids.kind=hash, one hash_size and one hash_seed",
                ", ".join(table.feature_names),
                table.name,
            )


def open_reader(
    job: TrainJob,
    dataset: Dataset,
    split: str,
    context: DistributedContext,
    global_batch_size: int | None = None,
    every_row: bool = False,
) -> ShardReader:
    """Training reads whole micro-batches; the other splits are read in evaluation batches, every row once. With
    `every_row` so is the training split, which then may end in a batch that is not full."""
    trainer, training = job.trainer, split == "train"
    default = trainer.micro_batch_size if training else trainer.evaluate_batch_size or trainer.global_batch_size
    return ShardReader(
        job.data.path,
        dataset,
        split,
        global_batch_size=global_batch_size or default,
        rank=context.rank,
        world_size=context.world_size,
        config=job.data.reader,
        seed=trainer.seed,
        multi_hot=job.data.synthetic_multi_hot,
        drop_last=training and not every_row,
        pin_memory=context.device.type == "cuda",
        split_ids=IdSplitter(
            resolve_tables(job.tables, dataset, job.data.synthetic_multi_hot), skip_empty_bags=context.world_size > 1
        ),
        quarantine_path=f"{job.run_dir}/quarantine/{split}.rank{context.rank}.jsonl",
    )
