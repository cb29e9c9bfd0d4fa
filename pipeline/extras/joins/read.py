"""Join the columns of side tables by the version of each row: to batches, and to row groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.dataset import Dataset, SideTable, weights_column
from pipeline.data.read.check_rows import ListRows, Lists
from pipeline.data.read.shard_files import HOW_TO_FIX
from pipeline.devices.cpu.kernel_pool import kernels
from pipeline.extras.joins.store import VERSION
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage


class _Columns(NamedTuple):
    """The columns that the rows of a batch get from one side table."""

    side: SideTable
    place_of: NDArray[np.int32]  # version -> row; -1 for a version that no row has
    dense: NDArray[np.float32]  # [rows, columns]: the values of a version are next to each other
    dense_at: NDArray[np.int64]  # the columns' places among the data set's
    one_hot: NDArray[np.int32]
    one_hot_at: NDArray[np.int64]
    lists: list[dict[int, Lists]]  # by their places; those of one dict have equal offsets


class JoinedColumns:
    """Adds columns to batches. See pipeline.data.read.assemble.SideColumns.

    A row has one number until its batch is assembled, so the reader does not copy, check and shuffle
    the joined columns. Their checksum was checked instead. Lists are copied once, to the batch.
    """

    def __init__(self, folder: str, dataset: Dataset) -> None:
        own, bags = dataset.without_side_columns, [each for each in dataset.sparse_features if each.multi_hot]
        one_hot = [each.name for each in dataset.sparse_features if not each.multi_hot]
        self._sizes = len(dataset.dense_features), len(one_hot), len(bags)
        self._own = (
            _places([dataset.dense_features.index(name) for name in own.dense_features]),
            _places([one_hot.index(each.name) for each in own.sparse_features if not each.multi_hot]),
            [at for at, each in enumerate(bags) if each in own.sparse_features],
        )
        self._sides = []
        for side in dataset.side_tables:
            table = load_side_table(folder, side)
            dense_at = [at for at, name in enumerate(dataset.dense_features) if name in side.columns]
            one_hot_at = [at for at, name in enumerate(one_hot) if name in side.columns]
            dense = _matrix(table, [dataset.dense_features[at] for at in dense_at], np.float32)
            ids = _matrix(table, [one_hot[at] for at in one_hot_at], np.int32)
            lists: dict[bytes, dict[int, Lists]] = {}
            for at, each in enumerate(bags):
                if each.name in side.columns:
                    found = _lists(table, each.name, each.weighted)
                    lists.setdefault(found.offsets.tobytes(), {})[at] = found
            places = [np.array(each, np.int64) for each in (dense_at, one_hot_at)]
            self._sides.append(
                _Columns(side, places_of(side, table), dense, places[0], ids, places[1], list(lists.values()))
            )

    def complete(
        self,
        dense: NDArray[np.float32],
        one_hot: NDArray[np.signedinteger],
        lists: list[ListRows],
        present: NDArray[np.bool_],
    ) -> tuple[NDArray[np.float32], NDArray[np.signedinteger], list[ListRows]]:
        is_whole = bool(present.all())
        num_own = len(one_hot) - len(self._sides)
        all_dense, all_ids = self._with_place(dense, one_hot[:num_own])
        all_lists = dict(zip(self._own[2], lists, strict=True))
        for of_rows, each in zip(one_hot[num_own:], self._sides, strict=True):
            rows = each.place_of.take(of_rows)
            if rows.min(initial=0) < 0:
                raise DataError(f"rows have versions that {each.side.path} lacks; {HOW_TO_FIX}")
            _copy_rows(each.one_hot, rows, each.one_hot_at, all_ids)
            if not is_whole:
                of_present, rows = rows, np.zeros(len(present), np.int32)
                rows[present] = of_present
            _copy_rows(each.dense, rows, each.dense_at, all_dense.T)
            for equally_long in each.lists:
                first = next(iter(equally_long.values()))
                chosen = first.choose(rows, None if is_whole else present)
                all_lists |= {at: ListRows(each, *chosen[1:]) for at, each in equally_long.items()}
        if not is_whole:
            all_dense[~present] = 0.0
        return all_dense, all_ids, [all_lists[at] for at in range(self._sizes[2])]

    def _with_place(
        self, dense: NDArray[np.float32], one_hot: NDArray[np.signedinteger]
    ) -> tuple[NDArray[np.float32], NDArray[np.signedinteger]]:
        """Return the columns of the rows with place for the columns of side tables."""
        if len(one_hot) < self._sizes[1]:
            ids = np.empty((self._sizes[1], one_hot.shape[1]), np.int64)
            ids[self._own[1]] = one_hot
            one_hot = ids
        if dense.shape[1] < self._sizes[0]:
            numbers = np.empty((len(dense), self._sizes[0]), np.float32)
            numbers[:, self._own[0]] = dense
            dense = numbers
        return dense, one_hot


def _places(places: list[int]) -> list[int] | slice:
    """Return a slice if the places are consecutive: numpy then copies without a look-up of each place."""
    consecutive = places == list(range(places[0], places[0] + len(places))) if places else False
    return slice(places[0], places[-1] + 1) if consecutive else places


def _copy_rows(table: NDArray[Any], rows: NDArray[np.int32], places: NDArray[np.int64], into: NDArray[Any]) -> None:
    """Set into[places[k], i] = table[rows[i], k]."""
    if not len(places):
        return
    if (compiled := kernels("pipeline.devices.cpu.kernels.lists")) is not None:
        compiled.copy_rows(table.reshape(-1), rows, places, into)
    else:
        into[places] = table[rows].T


def _matrix(table: pa.Table, names: list[str], kind: type[np.generic]) -> NDArray[Any]:
    """Return [rows, columns]."""
    columns = [table[name].to_numpy().astype(kind) for name in names]
    return np.stack(columns, axis=1) if columns else np.empty((table.num_rows, 0), kind)


def _lists(table: pa.Table, name: str, weighted: bool) -> Lists:
    column = table[name].combine_chunks()
    ids = column.flatten().to_numpy()
    lengths = column.value_lengths().to_numpy()
    weights = table[weights_column(name)].combine_chunks().flatten().to_numpy() if weighted else None
    if ids.size and ids.min() >= 0 and ids.max() < 2**16:
        ids = ids.astype(np.uint16)  # half the memory to read for each batch
    return Lists(ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), weights)


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
