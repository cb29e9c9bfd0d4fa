"""What a reader is that follows a stream: it has no last batch, and offsets say where it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pipeline.data.stream.new_values import Known

ENDLESS_STEPS = 1 << 40  # of an epoch of a stream


class EndOfInputError(Exception):
    """A stream gives no more rows, or the run was asked to stop while it waited for some: the training ends with a whole step."""


class TablesFullError(EndOfInputError):
    """New values of a stream have no row: the training ends with a whole step, and goes on from it with larger tables."""

    def __init__(self, tables: Iterable[str]) -> None:
        self.tables = sorted(tables)
        super().__init__(f"{len(self.tables)} tables are full of values, {', '.join(self.tables[:5])} among them")


@runtime_checkable
class StreamReading(Protocol):
    """A reader of a stream. A batch's number counts from 0 since the run began."""

    def place(self, batch: int) -> dict[str, Any]:
        """Where batch number `batch` begins, for a manifest; numbers only rise."""

    def go_to(self, batch: int, place: dict[str, Any]) -> None:
        """Before batches() begins there. Raises UserError where `place` is of another stream."""

    def values_of(self, batch: int) -> Known:
        """Values that batch `batch` is encoded with and the data set lacks."""

    def restore_values(self, batch: int, known: Known) -> None:
        """Those of the step that go_to() has gone to."""

    def progress(self, batch: int) -> dict[str, float]:
        """What the log and the metrics say once all batches before `batch` are trained on."""
