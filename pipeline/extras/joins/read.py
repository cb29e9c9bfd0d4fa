"""Read row groups with the columns of side tables, which are joined by the version of each row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.dataset import Dataset, SideTable
from pipeline.data.read.shard_files import HOW_TO_FIX
from pipeline.extras.joins.store import VERSION
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage


class JoinedRowGroups:
    """See pipeline.data.read.row_groups.ReadRowGroup. Readers of one process share the side tables."""

    def __init__(self, folder: str, dataset: Dataset) -> None:
        self._sides = [(side, _load(storage.join(folder, side.path), side.sha256)) for side in dataset.side_tables]

    def __call__(
        self, file: pq.ParquetFile, number: int, columns: Sequence[str] | None = None, **options: Any
    ) -> pa.Table:
        wanted = None if columns is None else set(columns)
        sides = [each for each in self._sides if wanted is None or wanted & {*each[0].columns}]
        stored = {name for side, _ in self._sides for name in side.columns}
        own = None
        if columns is not None:
            own = [name for name in columns if name not in stored] + [side.index for side, _ in sides]
        rows = file.read_row_group(number, columns=own, **options)
        for side, held in sides:
            rows = _with_columns(rows, side, held, wanted)
        return rows if columns is None else rows.select(list(columns))


class _Held:
    """A side table in memory. places: the row of a version; -1 if no row has it."""

    def __init__(self, table: pa.Table) -> None:
        versions = table[VERSION].to_numpy()
        self.places = np.full(int(versions.max(initial=-1)) + 1, -1, np.int32)
        self.places[versions] = np.arange(len(versions), dtype=np.int32)
        self.schema = table.schema
        self.columns = {name: table[name].combine_chunks() for name in table.column_names if name != VERSION}


@lru_cache(maxsize=16)
def _load(path: str, sha256: str) -> _Held:
    """Read a side table. Raises DataError if its bytes are not those of dataset.json."""
    if not storage.is_file(path):
        raise DataError(f"{path} is missing; {HOW_TO_FIX}")
    if (found := storage.sha256_of(path)) != sha256:
        raise DataError(f"{path} has the checksum {found}, dataset.json says {sha256}; {HOW_TO_FIX}")
    with storage.open_file(path, "rb") as file:
        return _Held(pq.read_table(file))


def _with_columns(rows: pa.Table, side: SideTable, held: _Held, wanted: set[str] | None) -> pa.Table:
    """Return the rows with the columns of a side table instead of its index."""
    versions = rows[side.index].to_numpy()
    if len(versions) and (versions.min() < 0 or versions.max() >= len(held.places)):
        raise pa.ArrowInvalid(f"column {side.index!r} has versions that {side.path} lacks")
    places = held.places[versions]
    if len(places) and places.min() < 0:
        raise pa.ArrowInvalid(f"column {side.index!r} has versions that {side.path} lacks")
    rows, at = rows.drop_columns([side.index]), pa.array(places)
    for name in side.columns:
        if wanted is None or name in wanted:
            rows = rows.append_column(held.schema.field(name), held.columns[name].take(at))
    return rows
