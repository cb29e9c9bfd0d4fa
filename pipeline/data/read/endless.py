"""Define a reader that follows a stream, and the file with the values that the stream added to
vocabularies.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage.storage import unpack_zlib

ENDLESS_STEPS = 1 << 40  # number of steps in an epoch of a stream
FILE = "new_values.json.z"  # file of a step, with the content of to_bytes()
MIN_UNPACKED, LARGEST_RATIO = 16 << 20, 32
Values = dict[str, list[str]]  # by vocabulary; a vocabulary has the name of its feature


class Known(NamedTuple):
    """The new values that a batch is encoded with.

    values: sorted by id. waiting: values that will get ids when their table has more rows.
    """

    values: Values
    waiting: Values


def to_bytes(known: Known) -> bytes:
    text = json.dumps(known._asdict(), ensure_ascii=False).encode()
    packed = zlib.compress(text, 1)
    return packed if len(text) <= _most_bytes(packed) else zlib.compress(text, 0)


def from_bytes(content: bytes) -> Known:
    """Return the values in `content`. Raises DamagedError if to_bytes() has not written `content`."""
    try:
        known = Known(**json.loads(unpack_zlib(content, _most_bytes(content))))
        if not all(map(_are_values, known)):
            raise ValueError("it holds other things than texts by vocabulary")
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{FILE} is not what a training writes ({str(error)[:200]})") from None
    return known


def _most_bytes(packed: bytes) -> int:
    """Return the maximum size of the unpacked bytes. All values differ, so they cannot be compressed much."""
    return MIN_UNPACKED + LARGEST_RATIO * len(packed)


def _are_values(values: object) -> bool:
    return isinstance(values, dict) and all(
        isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in values.values()
    )


class EndOfInputError(Exception):
    """A stream has no more rows, or the run was asked to stop while it waited for rows.

    Training ends with a complete step.
    """


class InputPausedError(EndOfInputError):
    """No row has arrived for some time.

    Training saves the complete step, and reads on from it.
    """


class TablesFullError(EndOfInputError):
    """New values of a stream have no free row in their table.

    Training ends with a complete step and continues with larger tables.
    """

    def __init__(self, tables: Iterable[str]) -> None:
        self.tables = sorted(tables)
        super().__init__(f"{len(self.tables)} tables are full of values, {', '.join(self.tables[:5])} among them")


@runtime_checkable
class StreamReading(Protocol):
    """A reader of a stream. Batches are numbered from 0 since the start of the run."""

    def place(self, batch: int) -> dict[str, Any]:
        """Return the place in the stream where batch number `batch` starts, to store it in a manifest.

        Numbers must not decrease between calls.
        """

    def go_to(self, batch: int, place: dict[str, Any]) -> None:
        """Let batches() start at this batch and place. Raises UserError if `place` belongs to another stream."""

    def values_of(self, batch: int) -> Known:
        """Return the values that batch `batch` is encoded with and that the data set does not have."""

    def restore_values(self, batch: int, known: Known) -> None:
        """Restore the new values that belong to the step which go_to() chose."""

    def progress(self, batch: int) -> dict[str, float]:
        """Return metrics for the log line that is written when all batches before `batch` were trained on."""
