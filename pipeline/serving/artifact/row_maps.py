"""Map hashed ids of a table with managed collision to the rows that they had when its training was saved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.compression.managed_collision import IDS_A_BUCKET


@dataclass(frozen=True)
class RowMap:
    """`ids` int64, ascending, as the id splitter hashes them (a bucket, then a number within it), and `rows` of the table.

    An id that is not among them shares the last row of its bucket.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    rows_a_bucket: int

    def problem(self, num_rows: int) -> str:
        """Return what no map of a table with `num_rows` rows has, or an empty string."""
        if not 1 <= self.rows_a_bucket <= num_rows:
            return f"has {self.rows_a_bucket} rows a bucket, and the table has {num_rows}"
        if len(self.ids) and (self.rows.min() < 0 or self.rows.max() >= num_rows):
            return f"has rows from {self.rows.min()} to {self.rows.max()}, and the table has {num_rows}"
        if (self.ids[1:] <= self.ids[:-1]).any():
            return "has ids that do not ascend"
        return ""

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] -> [n]"""
        shared = (ids // IDS_A_BUCKET + 1) * self.rows_a_bucket - 1
        if not len(self.ids):
            return shared
        positions = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[positions] == ids, self.rows[positions], shared)


def row_map(sorted_ids: NDArray[np.int64], rows: NDArray[np.int64], num_buckets: int) -> RowMap:
    """Of a checkpoint's state: bucket after bucket, each with numbers within it, ascending, and its own rows from 0 on; where it
    has fewer than it could, the last ones are the largest integer."""
    rows_a_bucket = len(sorted_ids) // num_buckets
    buckets = np.repeat(np.arange(num_buckets), rows_a_bucket)
    used = sorted_ids < IDS_A_BUCKET
    ids = buckets[used] * IDS_A_BUCKET + sorted_ids[used]
    return RowMap(ids, buckets[used] * rows_a_bucket + rows[used], rows_a_bucket)
