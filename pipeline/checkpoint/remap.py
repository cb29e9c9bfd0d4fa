"""Match the rows of two vocabularies of a feature that hold the same value.

Ids are sorted by frequency, so one more day of data moves most values to other rows. A copy by id
would give most values the vector of another value.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from pipeline.checkpoint.vocabularies import IdSpace
from pipeline.data.prepare.vocabulary import open_engine
from pipeline.data.sql import parquet
from pipeline.runtime.errors import CheckpointError
from pipeline.runtime.storage import storage

MEMORY_BYTES = 512 << 20  # memory of the join, which then spills to disk


@dataclass(frozen=True)
class RowMap:
    """How rows of the new table find their old rows: by equal ids, or by value in two vocabularies."""

    old: str | None = None
    new: str | None = None

    def pairs(self, first: int, count: int, old_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (old row, new row) for the new rows first..first+count that the old table has,
        sorted by old row.

        Row 0, the unknown row, stays row 0.
        """
        if self.old is None or self.new is None:
            rows = np.arange(first, max(first, min(first + count, old_rows)))
            return rows, rows
        with tempfile.TemporaryDirectory() as spill, open_engine(spill, MEMORY_BYTES, 1) as engine:
            found = _run(
                engine,
                f"SELECT old.id AS old_id, new.id AS new_id FROM {parquet(storage.local_path(self.new))} new "
                f"JOIN {parquet(storage.local_path(self.old))} old USING (value) "
                "WHERE new.id >= ? AND new.id < ? AND old.id < ? ORDER BY old_id",
                [max(first, 1), first + count, old_rows],
            )
        unknown = np.zeros(1 if first == 0 and count and old_rows else 0, dtype=np.int64)
        return np.concatenate([unknown, found["old_id"]]), np.concatenate([unknown, found["new_id"]])


def _run(engine: duckdb.DuckDBPyConnection, statement: str, values: list[Any]) -> dict[str, np.ndarray]:
    try:
        return engine.execute(statement, values).fetchnumpy()
    except (duckdb.InvalidInputException, duckdb.BinderException) as error:
        text = str(error).splitlines()[0]
        raise CheckpointError(f"a vocabulary cannot be read ({text}): prepare its data set again") from None


def match_ids(old: IdSpace, new: IdSpace) -> RowMap | str:
    """Return how rows move from one id space to the other, or a text that says why they cannot."""
    if old.vocabulary and new.vocabulary:
        same = storage.sha256_of(old.vocabulary) == storage.sha256_of(new.vocabulary)
        return RowMap() if same else RowMap(old.vocabulary, new.vocabulary)
    if old.hashed and new.hashed:
        if old.hashed == new.hashed:
            return RowMap()
        (size, seed), (new_size, new_seed) = old.hashed, new.hashed
        return f"its values were hashed to {size} rows with seed {seed}, and are now to {new_size} with seed {new_seed}"
    if old.hashed or new.hashed:
        then, now = ("by hash" if space.hashed else "by vocabulary" for space in (old, new))
        return f"its ids were given {then}, and are now {now}"
    return old.reason or new.reason
