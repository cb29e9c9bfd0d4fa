"""Watch each rank's reader, and end all ranks with one error where a reader fails.

A rank whose reader fails goes on with empty batches until the next step's agreement has told the others.
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
from pipeline.training.agreement import StepAgreement

Made = TypeVar("Made")
PORTABLE: tuple[type[Exception], ...] = (UserError, OSError, EndOfInputError)
FIRST_ROWS = 100_000  # the share of bad rows is taken of these at least: a bad row group comes all at once


class FailSafe:
    """A reader's batches, and empty ones after its failure, which is kept for the others to hear of."""

    def __init__(self, reader: BatchReader, on_error: Callable[[], None] = lambda: None) -> None:
        self.error: Exception | None = None
        self._reader, self._on_error = reader, on_error

    def batches(self, source: Iterator[Batch]) -> Generator[Batch, None, None]:
        """The same batches; after an error of `source`, empty ones for as long as they are asked for."""
        try:
            yield from source
        except Exception as error:
            self.error = error
            self._on_error()
            empty = self._reader.empty_batch()
            while True:
                yield empty


class InputWatch:
    """Every rank has one; the agreement of the next step tells the other ranks."""

    def __init__(self, reader: BatchReader, agreement: StepAgreement, context: DistributedContext) -> None:
        self._agreement, self._context = agreement, context
        self._fail_safe = FailSafe(reader, self._note_failure)

    def batches(self, source: Iterator[Batch]) -> Generator[Batch, None, None]:
        """As FailSafe's."""
        return self._fail_safe.batches(source)

    def _note_failure(self) -> None:
        if isinstance(self._fail_safe.error, EndOfInputError):
            self._agreement.input_ended = True
        else:
            self._agreement.input_failed = True

    def failure(self) -> Exception | None:
        """Collective after a failure: the error of the first rank whose reader failed; else None."""
        return agreed_failure(self._fail_safe.error, self._context) if self._agreement.input_failure_agreed else None


def too_many_bad(reader: BatchReader, bad: int, num_rows: int) -> TrainingError | None:
    """None while `bad` of `num_rows` rows, both of all ranks, are within data.reader.max_bad_fraction."""
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
    """Collective: the first failing rank's error, of the same kind and text on every rank; None where none failed."""
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
    """Its kind and arguments, such as any rank can build again."""
    if isinstance(error, OSError) and error.errno is not None:
        return "OSError", (error.errno, error.strerror, error.filename)
    kind = next((kind.__name__ for kind in PORTABLE if isinstance(error, kind)), "")
    return kind, (str(error) or repr(error),)


def on_all_ranks(work: Callable[[], Made], context: DistributedContext) -> Made:
    """Collective: what `work` makes on this rank. Raises on every rank where it raises on one."""
    made, error = None, None
    try:
        made = work()
    except (ValueError, OSError) as caught:
        error = caught
    failure = agreed_failure(error, context)
    if failure is not None:
        raise failure
    return cast(Made, made)
