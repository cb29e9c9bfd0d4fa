"""Train one model:  python -m pipeline train experiment=quickstart

On several ranks:  torchx run -s local_cwd pipeline.train -j 1x2 -- experiment=quickstart
A run folder that holds a checkpoint is resumed; another run_dir starts anew.
SIGTERM, or Ctrl-C once, saves at the next training step and ends with exit code 75 or 130; the same command goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.config.jobs.train import TrainJob
from pipeline.data.read.endless import ENDLESS_STEPS, StreamReading
from pipeline.embeddings.physical import signatures
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.process import watchdog
from pipeline.runtime.process.exit_codes import INTERRUPTED, REQUEUE
from pipeline.runtime.process.garbage import none_while_importing
from pipeline.runtime.shell_words import word
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.signature import requiring, signing
from pipeline.sharding.compat import allow_untested_versions
from pipeline.training.data_order import describe_data_order
from pipeline.training.remarks import remarks, undefined
from pipeline.training.run_state import (
    best_step,
    describe_job,
    earlier_tables,
    growing,
    open_checkpoints,
    resume,
    start_warm,
)

if TYPE_CHECKING:
    from pipeline.checkpoint.checkpointer import Checkpointer
    from pipeline.checkpoint.replicas import Replicas
    from pipeline.data.dataset import Dataset
    from pipeline.data.read.batches import BatchReader
    from pipeline.embeddings.describe import Savings
    from pipeline.planner.resolved_job import ResolvedJob
    from pipeline.runtime.logs import MetricsWriter
    from pipeline.runtime.process.distributed import DistributedContext
    from pipeline.training.assembly import Assembly
    from pipeline.training.optimizer import TrainingOptimizer
    from pipeline.training.trainer import FitResult

OpenInput = Callable[["ResolvedJob", "DistributedContext"], "BatchReader"]
SUMMARY = "summary.json"
LOG = "train.log"  # of rank 0, of all starts


@dataclass
class TrainSummary:
    """What a finished run leaves behind.

    `checkpoint` and `validation` are those of the best step where the run keeps it, else of the last one.
    """

    run_dir: str
    checkpoint: str
    step: int
    stopped_early: bool = False
    best_step: int | None = None  # by best_metric, among the checkpoints that are there; None: no best one is kept
    best_metric: str = ""
    throughput: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    bayes_auc: float | None = None
    remarks: list[str] = field(default_factory=list)  # on results that can hardly be meant
    num_bad_rows: int = 0  # quarantined in training, on all ranks; run_dir/quarantine lists them
    compression: dict[str, Any] = field(
        default_factory=dict
    )  # of each compressed table: its parts, bytes and collisions
    report: str = ""  # the page that shows the run, where one was written


def train(job: TrainJob, open_input: OpenInput | None = None) -> TrainSummary:
    """Collective: build, shard, resume, fit. Rank 0 writes the run folder, and holds it until it returns or raises.

    open_input: makes the reader of the batches, in the place of the one that reads the training split.

    Raises:
        TrainingError: the job does not fit the data, the hardware or the checkpoint in its run folder.
    """
    # Imported here, for a typo in the command line must fail before torch is loaded.
    with none_while_importing():
        from pipeline.devices.process_group import describe_threads, init_for
        from pipeline.runtime.logs import get_logger, log_file
        from pipeline.runtime.storage.run_folder import take_run_folder

    if job.sharding.allow_untested_versions:
        allow_untested_versions()
    context = init_for(job)
    if job.world_size != context.world_size:
        raise TrainingError(
            f"world_size={job.world_size}, but {context.world_size} rank(s) run; leave it to the launcher"
        )
    logger = get_logger("pipeline.train")
    lease = take_run_folder(job.run_dir, context, job.trainer.lease_ttl_s)
    try:
        with (
            signing(job.checkpoint.sign_key),
            requiring(job.checkpoint.require_signature),
            log_file(f"{job.run_dir}/{LOG}" if context.is_main else None),
        ):
            logger.info(describe_threads(context))
            result, summary = _train(job, context, lease.check if lease else None, open_input)
            if result.preempted:
                signal = "Ctrl-C" if result.interrupted else "SIGTERM"
                logger.info("stopped by %s at step %d, saved; the same command goes on", signal, result.step)
    finally:
        if lease:
            lease.release()
    if result.preempted:
        sys.exit(INTERRUPTED if result.interrupted else REQUEUE)
    return summary


def _train(
    job: TrainJob, context: DistributedContext, fence: Callable[[], None] | None, open_input: OpenInput | None
) -> tuple[FitResult, TrainSummary]:
    """Collective: train() within a run folder that is held."""
    with none_while_importing():
        from pipeline import devices
        from pipeline.checkpoint.random_state import kept_random_state, seed_random_state
        from pipeline.data.dataset import load_dataset
        from pipeline.sharding.torchrec.embedding_sync import TableReplicas
        from pipeline.training.assembly import assemble, open_reader, resolve
        from pipeline.training.compiled import DenseCompiler
        from pipeline.training.hooks.base import TrainingParts
        from pipeline.training.hooks.build import build_hooks, hook_names
        from pipeline.training.hooks.memory import MemoryWatch
        from pipeline.training.input_watch import on_all_ranks
        from pipeline.training.optimizer import build_optimizer
        from pipeline.training.trainer import Trainer

    hook_names(job)  # before anything is loaded: a misspelt one is an error
    watchdog.beat(phase="loading")
    seed_random_state(job.trainer.seed, context.rank)
    resolved = resolve(job, load_dataset(job.data.path), context, earlier_tables(job))
    job, dataset = resolved.job, resolved.dataset
    # Before memory is allocated: a missing shard shows here.
    reader = on_all_ranks(partial(open_input or _open_training_split, resolved, context), context)
    validation_reader = on_all_ranks(partial(open_reader, resolved, "validation", context), context)
    devices.current().keep_freed_memory(context.local_world_size)
    memory = MemoryWatch(context)
    assembly = assemble(resolved, context, initialize=False)
    savings = _log_plan(assembly, context)
    if job.trainer.compile:
        DenseCompiler().compile(assembly.task.model)
    optimizer = build_optimizer(assembly.model, job.optimizer, job.model.l2)
    replicas = TableReplicas(assembly.model, optimizer, job.parallel, context) if assembly.replicated else None
    checkpointer, restored = _resume(job, dataset, assembly, optimizer, context, fence, replicas, reader)
    if restored is None:  # again: the first step must not depend on what the start has drawn
        seed_random_state(job.trainer.seed, context.rank)
    with kept_random_state():
        writer = _open_writer(job, restored) if context.is_main else None
        parts = TrainingParts(
            assembly.model, assembly.task, optimizer, reader, checkpointer, context, validation_reader, writer,
            assembly.plan, memory, replicas,
        )  # fmt: skip
        trainer = Trainer(job, parts, build_hooks(job, parts))
    result = trainer.fit(restored)
    checkpointer.close()
    summary = _summarize(job, checkpointer, result, dataset, savings)
    if writer:
        writer.close()
        if result.throughput and not result.preempted:  # a run that had no step to train keeps the earlier summary
            steps = reader.steps_per_epoch // job.trainer.gradient_accumulation_steps
            steps = summary.step if steps >= ENDLESS_STEPS else steps  # a stream's rows are trained on once
            summary.remarks = remarks(job.trainer, summary.step, steps, summary.validation, writer.path)
            _write_summary(summary)
            if job.logger.report:
                from pipeline.training.runs.report import try_report

                summary.report = try_report(job.run_dir)
    return result, summary


def _open_training_split(resolved: ResolvedJob, context: DistributedContext) -> BatchReader:
    from pipeline.training.assembly import open_reader

    return open_reader(resolved, "train", context)


def _log_plan(assembly: Assembly, context: DistributedContext) -> list[Savings]:
    """Log the plan, and what compressed tables save. The savings are empty on other ranks than 0."""
    from pipeline.embeddings.describe import describe_savings, savings_of
    from pipeline.planner.explain import summarize
    from pipeline.runtime.logs import get_logger

    savings = savings_of(assembly.tables) if context.is_main else []
    for line in [summarize(assembly.plan), *describe_savings(savings)]:
        get_logger("pipeline.train").info("%s", line)
    return savings


def _resume(
    job: TrainJob,
    dataset: Dataset,
    assembly: Assembly,
    optimizer: TrainingOptimizer,
    context: DistributedContext,
    fence: Callable[[], None] | None,
    replicas: Replicas | None,
    reader: BatchReader,
) -> tuple[Checkpointer, dict[str, Any] | None]:
    """Collective: the run's checkpoints, and the manifest of the step that it goes on from; first weights where there is none.

    A checkpoint is read into the tables as they were allocated: what it fills is not initialized before. Of a training that follows a
    stream they may have more rows than the checkpoint's.
    """
    from pipeline.checkpoint.changes import CHECKPOINT
    from pipeline.planner.plan_codec import encode_record
    from pipeline.sharding.torchrec.changed_rows import TrackedRows
    from pipeline.sharding.torchrec.table_init import initialize_tables

    data_order = describe_data_order(job, dataset.fingerprint())
    about = describe_job(job, dataset, data_order, json.loads(encode_record(assembly.plan)))
    about["compression"] = signatures(assembly.tables)
    rows = TrackedRows(assembly.model, optimizer.replicated, [CHECKPOINT]) if job.checkpoint.differential else None
    checkpointer = open_checkpoints(job, assembly.model, optimizer, context, about, fence, replicas, rows)
    grow = growing(job, assembly, optimizer, context, dataset) if isinstance(reader, StreamReading) else None
    restored = resume(job, checkpointer, data_order, about["compression"], grow)
    if restored is None and job.warm_start is not None:
        start_warm(job, job.warm_start, assembly, optimizer, context, dataset)
    elif restored is None:
        initialize_tables(assembly.model, job.trainer.seed)
    return checkpointer, restored


def _open_writer(job: TrainJob, restored: dict[str, Any] | None) -> MetricsWriter:
    from pipeline.runtime.logs import MetricsWriter
    from pipeline.training.runs.folder import flat

    return MetricsWriter(job.run_dir, restored["step"] if restored else 0, job.logger.tensorboard, flat(job))


def _summarize(
    job: TrainJob, checkpointer: Checkpointer, result: FitResult, dataset: Dataset, savings: list[Savings]
) -> TrainSummary:
    from pipeline.checkpoint.steps import step_path
    from pipeline.embeddings.describe import as_json

    best = best_step(job.run_dir, job)
    step, metrics = best or (result.step, result.metrics)
    return TrainSummary(
        run_dir=job.run_dir,
        checkpoint=step_path(checkpointer.folder, step),
        step=result.step,
        stopped_early=result.stopped_early,
        best_step=best[0] if best else None,
        best_metric=job.best_metric if best else "",
        throughput=result.throughput,
        validation=metrics,
        bayes_auc=dataset.bayes_auc.get("validation"),
        num_bad_rows=result.num_bad_rows,
        compression=as_json(savings),
    )


def _write_summary(summary: TrainSummary) -> None:
    from pipeline.runtime.logs import to_json

    storage.publish_text(f"{summary.run_dir}/{SUMMARY}", to_json(asdict(summary), indent=1))


def describe(summary: TrainSummary) -> str:
    """The summary as text for a terminal: files, quality, speed, and the next command."""
    best = f", best step {summary.best_step} by {summary.best_metric}" if summary.best_step is not None else ""
    trained = "trained to" if summary.throughput else f"nothing was left to train: {summary.run_dir} is at"
    lines = [f"{trained} step {summary.step}{' (stopped early)' if summary.stopped_early else ''}{best}"]
    if summary.validation:
        lines.append(f"validation  {describe_quality(summary.validation, summary.bayes_auc)}")
    if summary.num_bad_rows:
        lines.append(
            f"quarantine  {summary.num_bad_rows:,} bad row(s) left out, listed in {summary.run_dir}/quarantine"
        )
    lines += [f"worth a look  {remark}" for remark in summary.remarks]
    lines += describe_run(summary.run_dir, summary.checkpoint, summary.throughput)
    if summary.report:
        lines.append(f"report      {summary.report}")
    lines.append(f"next        python -m pipeline evaluate {word('run', summary.run_dir)} split=test")
    return "\n".join(lines)


def describe_run(run_dir: str, checkpoint: str, throughput: dict[str, float]) -> list[str]:
    from pipeline.training.hooks.throughput import describe_comms_wait
    from pipeline.training.tier_rates import describe_tiers

    lines = [
        f"model       {checkpoint}",
        f"plan        {run_dir}/plan.json",
        f"metrics     {run_dir}/metrics.jsonl",
        f"plots       tensorboard --logdir {run_dir}/tensorboard",
    ]
    if throughput:
        lines.append(
            f"speed       {throughput['samples_per_s']:,.0f} samples/s in training, "
            f"{throughput['input_stall_percent']:.1f} % of the time waiting for input, "
            f"{describe_comms_wait(throughput)}, {describe_tiers(throughput).replace('  ', ', ')}{throughput['peak_memory_gb']:.2f} GiB a rank"
        )
    return lines


def describe_quality(metrics: dict[str, float], bayes_auc: float | None) -> str:
    """`bayes_auc`: of one label, or the main one of several."""
    if labels := list(dict.fromkeys(name.rpartition("/")[0] for name in metrics if "/" in name)):
        prefixes = [f"{label}/" for label in labels]
        parts = [
            {name.removeprefix(each): metrics[name] for name in metrics if name.startswith(each)} for each in prefixes
        ]
        said = [describe_quality(part, None if number else bayes_auc) for number, part in enumerate(parts)]
        return "; ".join(f"{label}: {text}" for label, text in zip(labels, said, strict=True))
    if reason := undefined(metrics):
        return f"undefined: {reason}; logloss {metrics['logloss']:.4f}"
    if "auc" not in metrics:
        return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if not isinstance(value, int))
    text = f"AUC {metrics['auc']:.4f}"
    if bayes_auc is not None:
        share = (metrics["auc"] - 0.5) / (bayes_auc - 0.5)
        text += f" of {bayes_auc:.4f}, the best that the data allows ({100 * share:.1f} % of the lift over 0.5)"
    return f"{text}, NE {metrics['ne']:.4f}, calibration {metrics['calibration']:.3f}"
