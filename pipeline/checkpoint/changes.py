"""Say what checkpoints and publications need to know of the rows that training has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

CHECKPOINT, PUBLISH = "checkpoint", "publish"  # who takes changed rows


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
