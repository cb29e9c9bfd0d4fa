"""Join the columns of side tables by the version of each row: to batches, and to row groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.dataset import Dataset, SideTable, weights_column
from pipeline.data.read.check_rows import Lists
from pipeline.data.read.shard_files import HOW_TO_FIX
from pipeline.extras.joins.store import VERSION
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage


class JoinedColumns:
    """Adds columns to batches. See pipeline.data.read.assemble.SideColumns.

    A row has one number until its batch is assembled, so the reader does not copy, check and shuffle
    the joined columns. Their checksum was checked instead.
    """

    def __init__(self, folder: str, dataset: Dataset) -> None:
        own, bags = dataset.without_side_columns, [each for each in dataset.sparse_features if each.multi_hot]
        one_hot = [each.name for each in dataset.sparse_features if not each.multi_hot]
        self._sizes = len(dataset.dense_features), len(one_hot), len(bags)
        self._own = (
            [dataset.dense_features.index(name) for name in own.dense_features],
            [one_hot.index(each.name) for each in own.sparse_features if not each.multi_hot],
            [at for at, each in enumerate(bags) if each in own.sparse_features],
        )
        self._sides = []
        for side in dataset.side_tables:
            table = load_side_table(folder, side)
            dense = [at for at, name in enumerate(dataset.dense_features) if name in side.columns]
            ids = [at for at, name in enumerate(one_hot) if name in side.columns]
            # Rows next to each other: one row of a version is copied at once.
            numbers = _matrix(table, [dataset.dense_features[at] for at in dense], np.float32)
            rows = _matrix(table, [one_hot[at] for at in ids], np.int32)
            lists = {
                at: _lists(table, each.name, each.weighted) for at, each in enumerate(bags) if each.name in side.columns
            }
            self._sides.append((side, places_of(side, table), dense, numbers, ids, rows, lists))

    def complete(
        self,
        dense: NDArray[np.float32],
        one_hot: NDArray[np.int64],
        lists: list[Lists],
        versions: NDArray[np.int32],
        present: NDArray[np.bool_],
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], list[Lists]]:
        all_dense = np.empty((len(dense), self._sizes[0]), np.float32)
        all_dense[:, self._own[0]] = dense
        all_ids = np.empty((self._sizes[1], one_hot.shape[1]), np.int64)
        all_ids[self._own[1]] = one_hot
        all_lists = dict(zip(self._own[2], lists, strict=True))
        is_whole = bool(present.all())
        for of_rows, (side, places, dense_at, numbers, ids_at, ids, bags) in zip(versions, self._sides, strict=True):
            of_rows = places[of_rows] if is_whole else np.where(present, places[of_rows * present], 0)
            if len(of_rows) and of_rows.min() < 0:
                raise DataError(f"rows have versions that {side.path} lacks; {HOW_TO_FIX}")
            if dense_at:
                found = numbers[of_rows]
                all_dense[:, dense_at] = found if is_whole else np.where(present[:, None], found, 0.0)
            if ids_at:
                all_ids[ids_at] = ids[of_rows if is_whole else of_rows[present]].T
            for at, of_table in bags.items():
                all_lists[at] = of_table.take(of_rows, None if is_whole else present)
        return all_dense, all_ids, [all_lists[at] for at in range(self._sizes[2])]


def _matrix(table: pa.Table, names: list[str], kind: type[np.generic]) -> NDArray[Any]:
    """Return [rows, columns]."""
    columns = [table[name].to_numpy().astype(kind) for name in names]
    return np.stack(columns, axis=1) if columns else np.empty((table.num_rows, 0), kind)


class _Bags(Lists):
    """Lists of versions. Lists of one length are copied by rows, which is faster."""

    @cached_property
    def _length(self) -> int:
        """Return the length of all lists; 0 if their lengths differ."""
        lengths = np.diff(self.offsets)
        return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0

    def take(self, rows: NDArray[np.int64], present: NDArray[np.bool_] | None = None) -> Lists:
        if present is not None or not (length := self._length):
            return super().take(rows, present)
        offsets = np.arange(len(rows) + 1) * length
        ids, weights = (
            None if each is None else np.take(each.reshape(-1, length), rows, axis=0).reshape(-1)
            for each in (self.ids, self.weights)
        )
        return Lists(ids, offsets, weights)  # type: ignore[arg-type]  # ids are not None


def _lists(table: pa.Table, name: str, weighted: bool) -> Lists:
    column = table[name].combine_chunks()
    ids = column.flatten().to_numpy()
    lengths = column.value_lengths().to_numpy()
    weights = table[weights_column(name)].combine_chunks().flatten().to_numpy() if weighted else None
    return _Bags(ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), weights)


class JoinedRowGroups:
    """See pipeline.data.read.row_groups.ReadRowGroup."""

    def __init__(self, folder: str, dataset: Dataset) -> None:
        self._sides = [(side, load_side_table(folder, side)) for side in dataset.side_tables]

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
        for side, table in sides:
            names = [name for name in side.columns if wanted is None or name in wanted]
            places = places_of(side, table)[rows[side.index].to_numpy()]
            joined = table.select(names).take(pa.array(places, mask=places < 0))
            rows = rows.drop_columns([side.index])
            for name in names:
                rows = rows.append_column(table.schema.field(name), joined[name])
        return rows if columns is None else rows.select(list(columns))


def load_side_table(folder: str, side: SideTable) -> pa.Table:
    """Return a side table; readers of one process share it. Raises DataError if its bytes differ from
    dataset.json."""
    return _load(storage.join(folder, side.path), side.sha256)


def places_of(side: SideTable, table: pa.Table) -> NDArray[np.int32]:
    """Return [versions]: the row of each version; -1 for a version that no row has."""
    places = np.full(side.num_versions, -1, np.int32)
    places[table[VERSION].to_numpy()] = np.arange(table.num_rows, dtype=np.int32)
    return places


@lru_cache(maxsize=16)
def _load(path: str, sha256: str) -> pa.Table:
    if not storage.is_file(path):
        raise DataError(f"{path} is missing; {HOW_TO_FIX}")
    if (found := storage.sha256_of(path)) != sha256:
        raise DataError(f"{path} has the checksum {found}, dataset.json says {sha256}; {HOW_TO_FIX}")
    with storage.open_file(path, "rb") as file:
        return pq.read_table(file).combine_chunks()
