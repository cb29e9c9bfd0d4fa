"""Train on a stream in one long process:  python -m pipeline retrain experiment=quickstart
source=clicks/ follow=true

Model, tables and optimizer stay in memory. Ids are those of the prepared data set `data.path`. The
initial weights are the champion's if the registry has one. Later new values (stream.new_values) get
separate rows. If a table is full, the step is saved, and larger tables are made in the same
process.
"""

from __future__ import annotations

import copy
import gc
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import find
from pipeline.data.dataset import load_dataset
from pipeline.extras.stream.table_capacity import capacities_of, with_capacity
from pipeline.retraining.challenger_job import warm_start_of
from pipeline.retraining.registry import Registry
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.processes import lower_priority
from pipeline.training.run_state import earlier_tables
from pipeline.training.summary import TrainSummary

if TYPE_CHECKING:
    from pipeline.data.read.batches import BatchReader
    from pipeline.extras.stream.reader import StreamReader
    from pipeline.extras.stream.source import StreamSource
    from pipeline.planner.resolved_job import ResolvedJob
    from pipeline.runtime.process.distributed import DistributedContext

FOLDER = "follow"  # the run folder in retrain's run_dir
JOURNAL = "stream/journal.jsonl"
PAUSE_S = 60.0  # without a row, where publishing.when counts steps
logger = get_logger("pipeline.retrain")


@dataclass(frozen=True)
class FollowSummary:
    """The result of a training that has followed a stream to its end, or until it was stopped."""

    trained: TrainSummary
    artifact: str = ""  # the artifact whose deltas were published

    def __str__(self) -> str:
        lines = [f"followed to step {self.trained.step}", f"model       {self.trained.checkpoint}"]
        return "\n".join([*lines, *([f"artifact    {self.artifact}"] if self.artifact else [])])


def follow(job: RetrainJob) -> FollowSummary:
    """Follow the stream until it ends, or until SIGTERM. SIGTERM ends the process with exit code
    75, as in training.

    Raises:
        UserError: the job does not fit the stream, the data set or the content of run_dir.
    """
    from pipeline.extras.publish.hook import artifact_of
    from pipeline.training.preflight import validate_job

    lower_priority(job.stream.priority)
    dataset, trained = load_dataset(job.data.path), follow_job(job)
    earlier, full = earlier_tables(trained), list[str]()
    while True:
        trained = with_capacity(trained, dataset, job.stream.new_values, earlier, full)
        validate_job(trained, job.world_size)
        summary, full = _follow(job, trained)
        if not full:
            break
        earlier = trained.tables
        gc.collect()  # the remains of smaller tables
    published = artifact_of(trained) if trained.publishing.when is not None else ""
    return FollowSummary(summary, published if published and os.path.isdir(published) else "")


def _follow(job: RetrainJob, trained: TrainJob) -> tuple[TrainSummary, list[str]]:
    """Train until the stream ends or tables are full. Return the names of the full tables."""
    readers: list[StreamReader] = []

    def open_input(resolved: ResolvedJob, context: DistributedContext) -> BatchReader:
        readers.append(open_stream(job, resolved, context))
        return readers[0]

    from pipeline.training.train import train  # loads torch

    summary = train(trained, open_input)
    return summary, readers[0].full


def follow_job(job: RetrainJob) -> TrainJob:
    """Return the train job, whose run folder is <run_dir>/follow. Raises DamagedError for a damaged champion."""
    trained = TrainJob(**{field.name: copy.deepcopy(getattr(job, field.name)) for field in fields(TrainJob)})
    trained.run_dir = os.path.join(job.run_dir, FOLDER)
    registry = Registry(job.registry.path)
    if (champion := registry.champion()) is not None:
        registry.check_inputs(champion)
        trained.warm_start = warm_start_of(champion, job)
    return trained


def open_stream(job: RetrainJob, resolved: ResolvedJob, context: DistributedContext) -> StreamReader:
    """Open the stream.

    Raises UserError if the source does not exist, or its rows do not fit the data set.
    """
    from pipeline.data.read.quarantine import Quarantine
    from pipeline.embeddings.id_splitter import IdSplitter
    from pipeline.extras.stream.encode import LineEncoder
    from pipeline.extras.stream.journal import Journal
    from pipeline.extras.stream.new_values import NewValues
    from pipeline.extras.stream.ranks import StreamRanks
    from pipeline.extras.stream.reader import StreamReader
    from pipeline.runtime.process.distributed import own_store
    from pipeline.training.readers import extra_rows_of

    run_dir, data = resolved.job.run_dir, resolved.job.data
    if data.joins and not job.stream.join:
        logger.info(
            "rows of the stream must hold %s: with stream.join=true the tables of data.joins are joined to them",
            ", ".join(data.joined_columns),
        )
    source: StreamSource = find("stream", job.stream.kind, "stream.kind")(job.source, job.stream, data)
    split_ids = IdSplitter(resolved.all_tables, skip_empty_bags=False)
    capacities = capacities_of(resolved.job, resolved.dataset, job.stream.new_values)
    aside = job.trainer.loss.columns
    rank, world_size, ranks = context.rank, context.world_size, None
    extra_rows = extra_rows_of(resolved, rank)
    encoder = LineEncoder(
        data, resolved.dataset, job.stream, resolved.targets, split_ids, capacities, aside, extra_rows
    )
    if world_size > 1:
        ranks = StreamRanks(own_store("stream"), rank, world_size)
    rows = Quarantine(os.path.join(run_dir, "quarantine", f"stream.rank{rank}.jsonl" if rank else "stream.jsonl"))
    return StreamReader(
        source, encoder, Journal(os.path.join(run_dir, JOURNAL)) if context.is_main else None,
        name=f"{job.stream.kind}:{job.source}", batch_size=resolved.job.trainer.micro_batch_size // world_size,
        stream=job.stream, config=data.reader, quarantine=rows, ranks=ranks,
        values=NewValues(capacities, job.stream.new_values.admit_probability), pause_s=_pause_s(resolved.job),
    )  # fmt: skip


def _pause_s(job: TrainJob) -> float | None:
    """Return after how many seconds without a row the last step is published; None: no step is, or
    the input could end within a step.
    """
    if job.publishing.cadence is None or job.trainer.gradient_accumulation_steps > 1:
        return None
    return job.publishing.cadence.seconds or PAUSE_S
