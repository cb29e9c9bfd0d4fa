"""Open the readers of a run, order their batches, and stop all ranks with one error if a reader fails.

A rank whose reader fails continues with empty batches. The next step's all-reduce tells the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import TypeVar, cast

import torch.distributed as dist

from pipeline import devices
from pipeline.config.registry import find
from pipeline.config.training import TrainerConfig
from pipeline.data.dataset import check_group
from pipeline.data.read.batch import Batch, ExtraRows
from pipeline.data.read.batches import BatchReader
from pipeline.data.read.endless import EndOfInputError, InputPausedError
from pipeline.data.read.reader import ShardReader
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.planner.resolved_job import ResolvedJob
from pipeline.runtime.errors import TrainingError, UserError
from pipeline.runtime.process import watchdog
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.step_sync import StepSync


def open_training_split(resolved: ResolvedJob, context: DistributedContext) -> ShardReader:
    return open_reader(resolved, "train", context)


def open_reader(
    resolved: ResolvedJob,
    split: str,
    context: DistributedContext,
    global_batch_size: int | None = None,
    every_row: bool = False,
    aside: Sequence[str] = (),
) -> ShardReader:
    """Open the reader of a split. The training split is read in full micro-batches, shuffled by
    trainer.seed.

    Other splits, and the training split with `every_row`, are read in evaluation batches: each row
    once, in an order that is the same for all runs. The last batch may be smaller. aside: label
    columns in Batch.aside, after the columns that the loss reads.
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
        with_groups=not training or every_row or trainer.loss.ranking is not None,
        pin=pinned if devices.current().copies_batches else None,
        split_ids=IdSplitter(resolved.all_tables, skip_empty_bags=context.world_size > 1),
        extra_rows=extra_rows_of(resolved, context.rank) if training and not every_row else None,
        targets=resolved.targets,
        aside=[*trainer.loss.columns, *aside],
        quarantine_path=f"{job.run_dir}/quarantine/{split}.rank{context.rank}.jsonl",
    )


def extra_rows_of(resolved: ResolvedJob, rank: int) -> ExtraRows | None:
    """Return the function by which the task of a model adds rows to training batches, None if it
    adds none.

    Only sparse_features gets the rows, so the model and the task must expect more rows there than
    in dense_features and labels. All ranks must add equally many. The rows may depend on nothing
    but the job, the rank, the epoch and the step, so that a resumed run reads the same batches.
    """
    task = find("task", resolved.job.model.task, f"task of model={resolved.job.model.kind}")
    make: Callable[[ResolvedJob, int], ExtraRows | None] | None = getattr(task, "extra_rows", None)
    return make(resolved, rank) if make else None


def pinned(batch: Batch) -> Batch:
    """Copy a batch to pinned memory. Works on any thread: a new thread would otherwise use the
    host's first device."""
    devices.current().start()
    return batch.pin_memory()


class BatchOrder:
    """The order of batches. `skipped` holds (step, n): at `step` the run went back and skipped the
    batches of n steps. Every manifest stores `skipped`."""

    def __init__(self, config: TrainerConfig, reader: BatchReader) -> None:
        self.skipped: list[tuple[int, int]] = []
        self._config, self._reader = config, reader
        self.accumulation = config.gradient_accumulation_steps
        # Micro-batches until the reader starts again from its beginning.
        self._round = (config.overfit_batches * self.accumulation) or reader.steps_per_epoch

    @property
    def total_steps(self) -> int:
        available = self._config.epochs * self._reader.steps_per_epoch // self.accumulation
        num_skipped = sum(count for _, count in self.skipped)
        return min(available - num_skipped, self._config.max_steps or 2**62)

    def position(self, step: int) -> int:
        return step + sum(count for at, count in self.skipped if at <= step)

    def epochs_done(self, step: int) -> int:
        """Return the number of epochs that are complete at the end of `step`. overfit_batches has
        shorter rounds."""
        return self.position(step) * self.accumulation // self._round

    def locate(self, micro_position: int) -> tuple[int, int]:
        """Return (epoch, batch within that epoch) of a position. The position counts
        micro-batches."""
        epoch, within = divmod(micro_position, self._round)
        return (0 if self._config.overfit_batches else epoch), within

    def batches(self, start_step: int) -> Generator[Batch, None, None]:
        """Yield all batches after `start_step`. The train pipeline reads a few batches ahead of the
        step."""
        position = self.position(start_step) * self.accumulation
        end = self.position(self.total_steps) * self.accumulation
        while position < end:
            watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
            epoch, within = self.locate(position)
            count = min(self._round - within, end - position)
            for batch in islice(self._reader.batches(epoch, start_step=within), count):
                watchdog.beat(phase="training")
                yield batch
                watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
            position += count


Made = TypeVar("Made")
PORTABLE: tuple[type[Exception], ...] = (UserError, OSError, InputPausedError, EndOfInputError)
# minimum of the rows that the share of bad rows is computed from: one bad row group can fail at
# once
FIRST_ROWS = 100_000


class FailSafe:
    """Yield a reader's batches. After a failure keep the error and yield empty batches."""

    def __init__(self, reader: BatchReader, on_error: Callable[[], None] = lambda: None) -> None:
        self.error: Exception | None = None
        self._reader, self._on_error = reader, on_error

    def batches(self, source: Iterator[Batch]) -> Generator[Batch, None, None]:
        """Yield the batches of `source`. After its error yield empty batches without end."""
        try:
            yield from source
        except Exception as error:
            self.error = error
            self._on_error()
            empty = self._reader.empty_batch()
            while True:
                yield empty


class InputWatch:
    """Reports a reader's failure to the other ranks at the next step. Every rank has one."""

    def __init__(self, reader: BatchReader, sync: StepSync, context: DistributedContext) -> None:
        self._sync, self._context = sync, context
        self._fail_safe = FailSafe(reader, self._note_failure)

    def batches(self, source: Iterator[Batch]) -> Generator[Batch, None, None]:
        """Yield batches as FailSafe.batches does. An earlier failure is forgotten."""
        self._fail_safe.error, self._sync.input_ended, self._sync.input_failed = None, False, False
        return self._fail_safe.batches(source)

    def _note_failure(self) -> None:
        if isinstance(self._fail_safe.error, EndOfInputError):
            self._sync.input_ended = True
        else:
            self._sync.input_failed = True

    def failure(self) -> Exception | None:
        """Return the error of the first rank whose reader failed, None without a failure.
        Collective after a failure."""
        return agreed_failure(self._fail_safe.error, self._context) if self._sync.input_failure_agreed else None


def too_many_bad(reader: BatchReader, bad: int, num_rows: int) -> TrainingError | None:
    """Return None while `bad` of `num_rows` rows (counted over all ranks) are within
    data.reader.max_bad_fraction."""
    fraction = reader.config.max_bad_fraction
    allowed = fraction * max(num_rows, min(FIRST_ROWS, reader.num_rows))
    if bad <= allowed:
        return None
    return TrainingError(
        f"{bad:,} of the {num_rows:,} rows read so far by all ranks are quarantined ({bad / num_rows:.2%}), and "
        f"data.reader.max_bad_fraction={fraction:g} allows {int(allowed):,}; the quarantine folder of the run says which "
        "and why. Fix or prepare the data again, or allow more, then run the same command again to resume"
    )


def agreed_failure(error: Exception | None, context: DistributedContext) -> Exception | None:
    """Return the first failing rank's error, with the same class and text on every rank, or None.
    Collective."""
    if context.world_size == 1:
        return error
    failures: list[tuple[str, tuple[object, ...]] | None] = [None] * context.world_size
    dist.all_gather_object(failures, None if error is None else _portable(error))
    rank = next((rank for rank, each in enumerate(failures) if each is not None), None)
    if rank is None:
        return None
    if rank == context.rank:
        return error
    kind, args = failures[rank] or ("", ())
    return {each.__name__: each for each in PORTABLE}.get(kind, RuntimeError)(*args)


def _portable(error: Exception) -> tuple[str, tuple[object, ...]]:
    """Return the error's class name and arguments, from which any rank can build it again."""
    if isinstance(error, OSError) and error.errno is not None:
        return "OSError", (error.errno, error.strerror, error.filename)
    kind = next((kind.__name__ for kind in PORTABLE if isinstance(error, kind)), "")
    return kind, (str(error) or repr(error),)


def on_all_ranks(work: Callable[[], Made], context: DistributedContext) -> Made:
    """Return what `work` returns on this rank. Raises on every rank if it raises on one.
    Collective."""
    made, error = None, None
    try:
        made = work()
    except (ValueError, OSError) as caught:
        error = caught
    failure = agreed_failure(error, context)
    if failure is not None:
        raise failure
    return cast(Made, made)
