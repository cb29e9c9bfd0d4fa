"""Match the rows of two vocabularies of a feature that hold the same value.

Ids go by descending frequency, so one more day of data gives most values another row: a copy by id would hand
every value the vector of some other one.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np

from pipeline.checkpoint.vocabularies import IdSpace
from pipeline.data.prepare.vocabulary import open_engine
from pipeline.runtime.errors import CheckpointError
from pipeline.runtime.storage import storage

MEMORY_BYTES = 512 << 20  # of the join; it spills to disk beyond


@dataclass(frozen=True)
class RowMap:
    """How rows of the new table find theirs in the old one: by equal ids, or by value in the two vocabularies."""

    old: str | None = None
    new: str | None = None

    def pairs(self, first: int, count: int, old_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(old row, new row) for those of the new rows first..first+count that are in the old table, by old row.

        Row 0, the unknown, stays row 0.
        """
        if self.old is None or self.new is None:
            rows = np.arange(first, max(first, min(first + count, old_rows)))
            return rows, rows
        with tempfile.TemporaryDirectory() as spill, open_engine(spill, MEMORY_BYTES, 1) as engine:
            found = _run(
                engine,
                "SELECT old.id AS old_id, new.id AS new_id FROM read_parquet(?) new JOIN read_parquet(?) old USING (value) "
                "WHERE new.id >= ? AND new.id < ? AND old.id < ? ORDER BY old_id",
                [storage.local_path(self.new), storage.local_path(self.old), max(first, 1), first + count, old_rows],
            )
        unknown = np.zeros(1 if first == 0 and count and old_rows else 0, dtype=np.int64)
        return np.concatenate([unknown, found["old_id"]]), np.concatenate([unknown, found["new_id"]])


def _run(engine: duckdb.DuckDBPyConnection, statement: str, values: list[Any]) -> dict[str, np.ndarray]:
    try:
        return engine.execute(statement, values).fetchnumpy()  # type: ignore[return-value]
    except (duckdb.InvalidInputException, duckdb.BinderException) as error:
        text = str(error).splitlines()[0]
        raise CheckpointError(f"a vocabulary cannot be read ({text}): prepare its data set again") from None


def match_ids(old: IdSpace, new: IdSpace) -> RowMap | str:
    """How to bring rows from one id space to the other, or why nobody can."""
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
