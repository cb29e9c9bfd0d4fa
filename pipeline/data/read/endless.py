"""What a reader is that follows a stream: it has no last batch, and offsets say where it is."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

ENDLESS_STEPS = 1 << 40  # of an epoch of a stream


class EndOfInputError(Exception):
    """A stream gives no more rows, or the run was asked to stop while it waited for some: the training ends with a whole step."""


@runtime_checkable
class StreamReading(Protocol):
    """A reader of a stream. A batch's number counts from 0 since the run began."""

    def place(self, batch: int) -> dict[str, Any]:
        """Where batch number `batch` begins, for a manifest; numbers only rise."""

    def go_to(self, batch: int, place: dict[str, Any]) -> None:
        """Before batches() begins there. Raises UserError where `place` is of another stream."""

    def progress(self, batch: int) -> dict[str, float]:
        """What the log and the metrics say once all batches before `batch` are trained on."""
