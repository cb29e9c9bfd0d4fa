"""Turn what happens to the readers of single ranks into one answer on all ranks, so that none waits for another in vain.

A rank whose reader fails goes on with empty batches until the next step's loss has told the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import torch.distributed as dist

from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from pipeline.models.tasks.guard import GuardedLoss
from pipeline.runtime.errors import TrainingError, UserError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.process.distributed import DistributedContext

FIRST_ROWS = 100_000  # the share of bad rows is taken of these at least: a bad row group comes all at once
logger = get_logger(__name__)


class FailSafe:
    """A reader's batches, and empty ones after its failure, which is kept for the others to hear of."""

    def __init__(self, reader: ShardReader, on_error: Callable[[], None] = lambda: None) -> None:
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
    """Every rank has one; `loss` carries the news."""

    def __init__(self, reader: ShardReader, loss: GuardedLoss, context: DistributedContext) -> None:
        self._reader, self._loss, self._context = reader, loss, context
        self._fail_safe = FailSafe(reader, self._note_failure)
        self._num_logged = 0

    def batches(self, source: Iterator[Batch]) -> Generator[Batch, None, None]:
        """As FailSafe's."""
        return self._fail_safe.batches(source)

    def _note_failure(self) -> None:
        self._loss.input_failed = True

    def problem(self, num_rows: int) -> Exception | None:
        """Collective after a failure: what ends the run on every rank, once `num_rows` rows were read by all."""
        if self._loss.input_failure_agreed:
            return agreed_failure(self._fail_safe.error, self._context)
        return too_many_bad(self._reader, self._loss.num_bad_rows, num_rows)

    def log(self, step: int, num_rows: int) -> None:
        """A line where rows were quarantined since the last."""
        bad = self._loss.num_bad_rows
        if bad > self._num_logged and self._context.is_main:
            logger.warning("step %d  %s of %s rows quarantined (%.3f %%)", step, f"{bad:,}", f"{num_rows:,}",
                           100 * bad / num_rows)  # fmt: skip
        self._num_logged = bad


def too_many_bad(reader: ShardReader, bad: int, num_rows: int) -> TrainingError | None:
    """None while `bad` of `num_rows` rows, both of all ranks, are within data.reader.max_bad_fraction."""
    fraction = reader.config.max_bad_fraction
    allowed = fraction * max(num_rows, min(FIRST_ROWS, reader.num_rows))
    if bad <= allowed:
        return None
    return TrainingError(
        f"{bad:,} of the {num_rows:,} rows read so far by all ranks are quarantined ({bad / num_rows:.2%}), and "
        f"data.reader.max_bad_fraction={fraction:g} allows {int(allowed):,}; the quarantine folder of the run says which "
        "and why. Mend or prepare the data again, or allow more: the same command then goes on"
    )


def agreed_failure(error: Exception | None, context: DistributedContext) -> Exception | None:
    """Collective: the first failing rank's error, of the same kind and text on every rank; None where none failed."""
    if context.world_size == 1:
        return error
    found: list[tuple[str, tuple[object, ...]] | None] = [None] * context.world_size
    dist.all_gather_object(found, None if error is None else _portable(error))
    rank = next((rank for rank, each in enumerate(found) if each is not None), None)
    if rank is None:
        return None
    if rank == context.rank:
        return error
    kind, args = found[rank] or ("", ())
    return {"UserError": UserError, "OSError": OSError}.get(kind, RuntimeError)(*args)


def _portable(error: Exception) -> tuple[str, tuple[object, ...]]:
    """Its kind and arguments, such as any rank can build again."""
    if isinstance(error, OSError) and error.errno is not None:
        return "OSError", (error.errno, error.strerror, error.filename)
    kind = next((kind.__name__ for kind in (UserError, OSError) if isinstance(error, kind)), "")
    return kind, (str(error) or repr(error),)


def on_all_ranks(work: Callable[[], ShardReader], context: DistributedContext) -> ShardReader:
    """Collective: what `work` makes on this rank. Raises on every rank where it raises on one."""
    made, error = None, None
    try:
        made = work()
    except (ValueError, OSError) as caught:
        error = caught
    failure = agreed_failure(error, context)
    if failure is not None:
        raise failure
    assert made is not None
    return made
