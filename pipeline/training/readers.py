"""Open the readers of a run's splits."""

from __future__ import annotations

from pipeline import devices
from pipeline.data.dataset import check_group
from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.process.distributed import DistributedContext


def open_training_split(resolved: ResolvedJob, context: DistributedContext) -> ShardReader:
    return open_reader(resolved, "train", context)


def open_reader(
    resolved: ResolvedJob,
    split: str,
    context: DistributedContext,
    global_batch_size: int | None = None,
    every_row: bool = False,
) -> ShardReader:
    """Open the reader of a split. The training split is read in full micro-batches, shuffled by
    trainer.seed.

    Other splits, and the training split with `every_row`, are read in evaluation batches: each row
    once, in an order that is the same for all runs. The last batch may be smaller.
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
    """Copy a batch to pinned memory.

    Works on any thread: a new thread would otherwise use the host's first device.
    """
    devices.current().start()
    return batch.pin_memory()
