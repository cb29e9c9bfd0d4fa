"""Watch each rank's reader, and stop all ranks with one error if a reader fails.

A rank whose reader fails continues with empty batches. The next step's all-reduce tells the other
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar, cast

import torch.distributed as dist

from pipeline.data.read.batch import Batch
from pipeline.data.read.batches import BatchReader
from pipeline.data.read.endless import EndOfInputError
from pipeline.runtime.errors import TrainingError, UserError
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.step_sync import StepSync

Made = TypeVar("Made")
PORTABLE: tuple[type[Exception], ...] = (UserError, OSError, EndOfInputError)
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
        """Yield batches as FailSafe.batches does."""
        return self._fail_safe.batches(source)

    def _note_failure(self) -> None:
        if isinstance(self._fail_safe.error, EndOfInputError):
            self._sync.input_ended = True
        else:
            self._sync.input_failed = True

    def failure(self) -> Exception | None:
        """Return the error of the first rank whose reader failed, None without a failure.

        Collective after a failure.
        """
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

    Collective.
    """
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
    """Return what `work` returns on this rank.

    Raises on every rank if it raises on one. Collective.
    """
    made, error = None, None
    try:
        made = work()
    except (ValueError, OSError) as caught:
        error = caught
    failure = agreed_failure(error, context)
    if failure is not None:
        raise failure
    return cast(Made, made)
