"""Define how checkpoints and publishing learn which rows training has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# the name of the consumer of changed rows; other consumers have other names
CHECKPOINT = "checkpoint"


class ShardPlace(NamedTuple):
    """Start of a rank's part of a table: (0, 0) for a table that every rank holds completely."""

    table: str
    row: int
    column: int


Rows = NDArray[np.int64]  # ascending, counted from the shard's first row
ShardRows = Mapping[ShardPlace, Rows]


class ChangedRows(Protocol):
    """The changed rows of this rank's shards. No other rank returns rows of these shards."""

    def take(self, consumer: str) -> ShardRows:
        """Return the rows of every shard that changed since `consumer` last called this. Local;
        call it between two steps."""

    def put_back(self, consumer: str, rows: ShardRows) -> None:
        """Return rows that could not be saved. The next take() returns them again."""


@dataclass(frozen=True)
class Differential:
    """Settings to save links of a chain with the changed rows. A base follows after `most_links`
    links, or if they hold more than `most_bytes` times the base's bytes. is_packed: shard files of
    links are compressed."""

    rows: ChangedRows
    most_links: int
    most_bytes: float = 0.5
    is_packed: bool = False
