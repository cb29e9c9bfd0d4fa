"""Train one model:  python -m pipeline train experiment=quickstart

resolve -> read -> build -> plan -> shard -> restore -> hooks -> fit -> summarize. This file is the complete path; each step
is one call away. A run folder that holds a checkpoint is resumed; another run_dir starts a new run.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pipeline import devices
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.random_state import kept_random_state, seed_random_state
from pipeline.checkpoint.tables import Replicas
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import if_installed
from pipeline.config.saved_jobs import flat
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.read.batches import BatchReader
from pipeline.data.read.endless import StreamReading
from pipeline.devices.process_group import describe_threads, init_for
from pipeline.embeddings.physical import signatures
from pipeline.planner.explain import summarize as summarize_plan
from pipeline.planner.plan_codec import encode_record
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import MetricsWriter, get_logger, log_file, quiet_libraries
from pipeline.runtime.process import watchdog
from pipeline.runtime.process.distributed import DistributedContext, take_run_folder
from pipeline.runtime.process.exit_codes import INTERRUPTED, REQUEUE
from pipeline.runtime.storage.signature import requiring, signing
from pipeline.sharding.compat import allow_untested_versions
from pipeline.training.hooks.base import TrainingParts, build_hooks, hook_names
from pipeline.training.memory_watch import MemoryWatch
from pipeline.training.optimizer import TrainingOptimizer, build_optimizer
from pipeline.training.preflight import describe_data_order
from pipeline.training.readers import on_all_ranks, open_reader, open_training_split
from pipeline.training.run_state import (
    describe_job,
    earlier_tables,
    initializer,
    open_checkpoints,
    resume,
    start_warm,
    table_grower,
)  # fmt: skip
from pipeline.training.sharded_model import ShardedModel, build_task, open_replicas, plan_tables, resolve, shard
from pipeline.training.summary import TrainSummary, summarize, write_summary
from pipeline.training.trainer import FitResult, Trainer

OpenInput = Callable[[ResolvedJob, DistributedContext], BatchReader]
Fence = Callable[[], None]  # raises if this run has lost its folder to another
LOG = "train.log"  # log of rank 0, of all attempts
logger = get_logger("pipeline.train")


@quiet_libraries()
def train(job: TrainJob, open_input: OpenInput | None = None) -> TrainSummary:
    """Train, or resume a training run. Rank 0 writes the run folder and holds its lease.
    Collective. `open_input` opens the reader of the batches, instead of the reader of the training
    split. Raises TrainingError if the job does not fit the data, the hardware or the checkpoint in
    its run folder."""
    if job.sharding.allow_untested_versions:
        allow_untested_versions()
    context = init_for(job)
    devices.current().check_precision(job.trainer.precision)
    if job.world_size != context.world_size:
        raise TrainingError(
            f"world_size={job.world_size}, but {context.world_size} rank(s) run; leave it to the launcher"
        )
    with _run_folder(job, context) as fence:
        logger.info(describe_threads(context))
        result, summary = _train(job, context, fence, open_input or open_training_split)
        if result.preempted:
            signal = "Ctrl-C" if result.interrupted else "SIGTERM"
            logger.info("stopped by %s at step %d, saved; run the same command again", signal, result.step)
    if result.preempted:
        sys.exit(INTERRUPTED if result.interrupted else REQUEUE)
    return summary


def _train(
    job: TrainJob, context: DistributedContext, fence: Fence | None, open_input: OpenInput
) -> tuple[FitResult, TrainSummary]:
    """Run the steps of the recipe. Collective."""
    hook_names(job)  # before anything is loaded: a misspelled name is an error
    watchdog.beat(phase="loading")
    seed_random_state(job.trainer.seed, context.rank)
    resolved = resolve(job, load_dataset(job.data.path), context, earlier_tables(job))
    job, dataset = resolved.job, resolved.dataset

    # Before memory is allocated, so that a missing file of the data set fails early.
    reader = on_all_ranks(partial(open_input, resolved, context), context)
    validation_reader = on_all_ranks(partial(open_reader, resolved, "validation", context), context)

    devices.current().keep_freed_memory(context.local_world_size)
    memory = MemoryWatch(context)
    task = build_task(resolved, devices.current().device_type)
    plan = plan_tables(resolved, task, context)
    sharded = shard(resolved, task, plan, context, initialize=False)
    report_savings = if_installed("report_savings") if context.is_main else None
    lines, savings = report_savings(sharded.tables) if report_savings else ([], {})
    for line in [summarize_plan(plan), *lines]:
        logger.info("%s", line)
    if job.trainer.compile:
        from pipeline.training.compiled import DenseCompiler

        DenseCompiler().compile(task.model)
    optimizer = build_optimizer(sharded.model, job.optimizer, job.model.l2)

    replicas = open_replicas(sharded, optimizer, job.parallel, context)
    checkpointer, restored = _restore(job, dataset, sharded, optimizer, context, fence, replicas, reader)
    if restored is None:  # the first step must not depend on the numbers drawn so far
        seed_random_state(job.trainer.seed, context.rank)

    with kept_random_state():
        writer = _open_writer(job, restored) if context.is_main else None
        parts = TrainingParts(
            sharded.model, task, optimizer, reader, checkpointer, context, validation_reader, writer,
            plan, memory, replicas,
        )  # fmt: skip
        trainer = Trainer(job, parts, build_hooks(job, parts))
    result = trainer.fit(restored)
    checkpointer.close()
    summary = summarize(job, checkpointer, result, dataset, savings)
    if writer:
        _finish(job, summary, result, writer)
    return result, summary


@contextmanager
def _run_folder(job: TrainJob, context: DistributedContext) -> Iterator[Fence | None]:
    """Hold the run folder, sign and verify checkpoints by the job, write the log of rank 0."""
    lease = take_run_folder(job.run_dir, context, job.trainer.lease_ttl_s)
    try:
        with (
            signing(job.checkpoint.sign_key),
            requiring(job.checkpoint.require_signature),
            log_file(f"{job.run_dir}/{LOG}" if context.is_main else None),
        ):
            yield lease.check if lease else None
    finally:
        if lease:
            lease.release()
            atexit.unregister(lease.release)


def _restore(
    job: TrainJob,
    dataset: Dataset,
    sharded: ShardedModel,
    optimizer: TrainingOptimizer,
    context: DistributedContext,
    fence: Fence | None,
    replicas: Replicas | None,
    reader: BatchReader,
) -> tuple[Checkpointer, dict[str, Any] | None]:
    """Open the run's checkpoints, restore the newest, and return its manifest. Collective. Without
    a checkpoint the tables start from the run in warm_start, or from initial weights. Tables of a
    stream may have more rows than the checkpoint."""
    data_order = describe_data_order(job, dataset.fingerprint())
    about = describe_job(job, dataset, data_order, json.loads(encode_record(sharded.plan)))
    about["compression"] = signatures(sharded.tables)
    checkpointer = open_checkpoints(job, sharded.model, optimizer, context, about, fence, replicas)
    grow = table_grower(job, sharded, optimizer, context, dataset) if isinstance(reader, StreamReading) else None
    restored = resume(job, checkpointer, data_order, about["compression"], grow)
    if restored is None and job.warm_start is not None:
        start_warm(job, job.warm_start, sharded, optimizer, context, dataset)
    elif restored is None:
        initializer(job, sharded, dataset)(None)
    return checkpointer, restored


def _open_writer(job: TrainJob, restored: dict[str, Any] | None) -> MetricsWriter:
    return MetricsWriter(job.run_dir, restored["step"] if restored else 0, job.logger.tensorboard, flat(job))


def _finish(job: TrainJob, summary: TrainSummary, result: FitResult, writer: MetricsWriter) -> None:
    """Write the summary and the report. Without a step to train the earlier summary stays."""
    writer.close()
    if not result.throughput or result.preempted:
        return
    write_summary(summary)
    if diagnose := if_installed("diagnose"):  # it reads the summary
        summary.remarks = diagnose(job.run_dir)
        write_summary(summary)
    if job.logger.report and (try_report := if_installed("try_report")):
        summary.report = try_report(job.run_dir, has_ended=True)
