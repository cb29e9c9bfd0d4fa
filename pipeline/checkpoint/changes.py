"""Say what checkpoints and publications need to know of the rows that training has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

CHECKPOINT = "checkpoint"  # who takes changed rows; further consumers have names of their own


class ShardPlace(NamedTuple):
    """Where a rank's part of a table begins: (0, 0) for a table that lies whole on each rank."""

    table: str
    row: int
    column: int


Rows = NDArray[np.int64]  # ascending, counted from the shard's first row
ShardRows = Mapping[ShardPlace, Rows]


class ChangedRows(Protocol):
    """The rows of this rank's shards that have changed; of each shard, those of no other rank."""

    def take(self, consumer: str) -> ShardRows:
        """Of every shard the rows that have changed since `consumer` last took them. Local; between two steps."""

    def put_back(self, consumer: str, rows: ShardRows) -> None:
        """What was taken in vain is taken again the next time."""


@dataclass(frozen=True)
class Differential:
    """Save links of a chain, by the rows that have changed.

    A base follows after `most_links` of them, or where they hold more than `most_bytes` times the base's bytes. is_packed: their
    shard files are compressed.
    """

    rows: ChangedRows
    most_links: int
    most_bytes: float = 0.5
    is_packed: bool = False
