"""Define a reader that follows a stream, and the file of values that the stream added to the vocabularies."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage.unpack import unpack_zlib

ENDLESS_STEPS = 1 << 40  # of an epoch of a stream
FILE = "new_values.json.z"  # of a step: what to_bytes() makes
MIN_UNPACKED, LARGEST_RATIO = 16 << 20, 32
Values = dict[str, list[str]]  # by vocabulary, which has the name of the feature that it belongs to


class Known(NamedTuple):
    """The new values that a batch is encoded with.

    values: by ascending id. waiting: values that were chosen for ids and wait until their table grows.
    """

    values: Values
    waiting: Values


def to_bytes(known: Known) -> bytes:
    text = json.dumps(known._asdict(), ensure_ascii=False).encode()
    packed = zlib.compress(text, 1)
    return packed if len(text) <= _most_bytes(packed) else zlib.compress(text, 0)


def from_bytes(content: bytes) -> Known:
    """Raise DamagedError if to_bytes() has not written `content`."""
    try:
        known = Known(**json.loads(unpack_zlib(content, _most_bytes(content))))
        if not all(map(_are_values, known)):
            raise ValueError("it holds other things than texts by vocabulary")
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{FILE} is not what a training writes ({str(error)[:200]})") from None
    return known


def _most_bytes(packed: bytes) -> int:
    """Return how many bytes are unpacked. Values differ, so they do not shrink as the text of a bomb does."""
    return MIN_UNPACKED + LARGEST_RATIO * len(packed)


def _are_values(values: object) -> bool:
    return isinstance(values, dict) and all(
        isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in values.values()
    )


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
