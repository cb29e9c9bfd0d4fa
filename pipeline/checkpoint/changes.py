"""Define how checkpoints and publishing learn which rows training has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# the name of the consumer of changed rows; other consumers have other names
CHECKPOINT = "checkpoint"


class ShardPlace(NamedTuple):
    """The first row and column of a rank's part of a table. (0, 0) if every rank holds all of the table."""

    table: str
    row: int
    column: int


Rows = NDArray[np.int64]  # ascending, counted from the shard's first row
ShardRows = Mapping[ShardPlace, Rows]


class ChangedRows(Protocol):
    """The changed rows of this rank's shards. No other rank reports rows of these shards."""

    def take(self, consumer: str) -> ShardRows:
        """Return the rows of every shard that changed since `consumer` last called this method.
        Local; call it between two steps.
        """

    def put_back(self, consumer: str, rows: ShardRows) -> None:
        """Take back rows that could not be saved. The next take() returns them again."""


class Differential(Protocol):
    """Settings to save links (the changed rows). is_packed: shard files of links are compressed."""

    rows: ChangedRows
    is_packed: bool

    def link_after(self, path: str) -> dict[str, Any] | None:
        """Return the chain entry for the manifest of a link after the step at `path`; None if a base is due.
        Raises DamagedError."""

    def link_state(self, flat: Mapping[str, Any], rows: ShardRows, rank: int) -> dict[str, Any]:
        """Return the part of a flat state (see tables.flatten) that a link writes."""
