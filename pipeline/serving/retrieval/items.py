"""Keep the items of an artifact by position: their raw values, and the positions of raw values that a filter names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.read.value_index import ValueIndex, index_values
from pipeline.serving.artifact.manifest import ArtifactError

COLUMN = "item"


class Items:
    """`values` [num_items] text, all different."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        self._index = ValueIndex([index_values([(1, values.to_pylist())])])

    @classmethod
    def from_table(cls, table: pa.Table, num_items: int) -> Items:
        """Raises ArtifactError for what is no list of that many items."""
        kinds = (pa.string(), pa.large_string())
        if table.column_names != [COLUMN] or table[COLUMN].type not in kinds or table[COLUMN].null_count:
            raise ArtifactError(f"the items are a column {COLUMN!r} of text, not {table.schema.names}; export again")
        if table.num_rows != num_items:
            raise ArtifactError(f"it names {table.num_rows:,} items and has {num_items:,}; export again")
        return cls(table[COLUMN].combine_chunks())

    def __len__(self) -> int:
        return len(self._values)

    def values_at(self, positions: NDArray[np.int64]) -> pa.Array:
        return self._values.take(pa.array(positions))

    def positions_of(self, values: Iterable[str]) -> NDArray[np.int64]:
        """Ascending and different; values that are no item are left out."""
        texts: Sequence[str] = list(values)
        found = self._index.ids(np.zeros(len(texts), np.int64), pa.array(texts, pa.large_string()))
        return np.unique(found[found > 0] - 1)
