"""Decode a row group of a Parquet shard to a Block of checked, shuffled columns.

Data that would silently spoil training is refused here or quarantined (data.read.check_rows finds
the rows): ids outside the table, invalid labels, values that are missing or not finite, and files
that differ from dataset.json.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.dataset import GROUP_COLUMN, Dataset, Split, weights_column
from pipeline.data.read.check_rows import Columns, Lists, check_columns, label_shape, num_bytes
from pipeline.data.read.quarantine import Quarantine
from pipeline.data.read.shard_files import HOW_TO_FIX, ShardError, ShardFiles, check_layout
from pipeline.data.read.streams import Segment, row_permutation, with_groups_together
from pipeline.runtime.errors import DataError
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage

MAX_IDLE_FILES = 32
logger = get_logger(__name__)
TO_QUARANTINE = "or leave such rows out with data.reader.on_bad_rows=quarantine (rows count from 0)"


@dataclass(frozen=True)
class Block:
    """Rows in reading order. Features keep the order of Columns within `one_hot` and `lists`.

    Rows that are not `present` are quarantined: dense 0, label 0, empty lists, and undefined
    one-hot ids.
    """

    dense: NDArray[np.float32]  # [rows, num_dense]
    one_hot: NDArray[np.signedinteger]  # [num_one_hot + side tables, rows]
    lists: list[Lists]
    labels: NDArray[np.float32]  # [rows], or [rows, label columns] if there are several
    present: NDArray[np.bool_] | None = None  # None: all rows are present
    groups: NDArray[np.int64] | None = None  # [rows], if they were read


class Checked(NamedTuple):
    """A row group in file order, and row -> reason for bad rows."""

    columns: Columns
    reasons: dict[int, str]


class Shards:
    """The files of one split. Several threads may decode at once; each uses a separate file handle.

    quarantine: stores the bad rows, which are then not `present` in the Block; None: the first bad
    row raises DataError. with_groups: also read the groups of rows. groups_together: keep the rows
    of a group of a row group together if rows are shuffled.
    keep_bytes: a split whose checked columns fit this size is decoded once. Several streams read
    rows of one row group, and every epoch reads all rows again.
    """

    def __init__(
        self,
        folder: str,
        dataset: Dataset,
        split: Split,
        quarantine: Quarantine | None = None,
        with_groups: bool = False,
        keep_bytes: int = 0,
        groups_together: bool = False,
    ) -> None:
        # Columns of side tables are joined when batches are assembled.
        self.dataset, self._groups_together, self._looked_at_groups = dataset, groups_together, False
        self._keep_bytes, self._kept = keep_bytes, dict[int, Checked]()  # by row group
        self.row_group_sizes = [rows for shard in split.files for rows in shard.row_groups]
        self.files = ShardFiles(folder, split, must_be_whole=quarantine is None)
        self._quarantine = quarantine
        self._places = [
            (i, group, first)
            for i, shard in enumerate(split.files)
            for group, first in enumerate(accumulate(shard.row_groups[:-1], initial=0))
        ]
        self._columns = [*dataset.label_columns, *dataset.dense_features, *dataset.sparse_feature_names]
        self._columns += map(weights_column, dataset.weighted_features)
        self._columns += [side.index for side in dataset.side_tables]
        if with_groups:
            self._columns.append(GROUP_COLUMN)
        self._idle: OrderedDict[int, list[pq.ParquetFile]] = OrderedDict()
        self._lock = threading.Lock()

    def locate(self, row_group: int, row: int) -> tuple[str, int]:
        """Return the file (as named in dataset.json) that holds a row of a row group, and the row's
        number in the file, from 0.
        """
        index, _, first = self._places[row_group]
        return self.files[index].path, first + row

    def order(self, row_group: int, seed: int, epoch: int, shuffled: bool) -> NDArray[np.int64]:
        """Return the rows of a row group in reading order."""
        groups = self._checked(row_group).columns.groups if shuffled and self._groups_together else None
        return self._order(row_group, seed, epoch, shuffled, groups)

    def _order(
        self, row_group: int, seed: int, epoch: int, shuffled: bool, groups: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        rows = self.row_group_sizes[row_group]
        if not shuffled:
            return np.arange(rows)
        permutation = row_permutation(seed, epoch, row_group, rows)
        if not self._groups_together or groups is None:
            return permutation
        if not self._looked_at_groups:
            self._looked_at_groups = True
            _warn_of_scattered_groups(groups)
        return with_groups_together(permutation, groups)

    def decode(self, segment: Segment, seed: int, epoch: int, shuffled: bool) -> Block:
        """Return a segment's Block. Raises DataError, which names file, row, column and value, for
        data that must not be trained on.
        """
        rows = self.row_group_sizes[segment.row_group]
        index, _, first = self._places[segment.row_group]
        try:
            columns, reasons = self._checked(segment.row_group)
        except ShardError as error:
            self.files.check_unchanged(index)  # if the file changed, report that instead
            if self._quarantine is None:
                raise
            self._quarantine.add(self.files[index].path, {first: str(error)}, num_rows=rows)
            return self._nothing(segment.stop - segment.start)
        self.files.check_unchanged(index)
        chosen = self._order(segment.row_group, seed, epoch, shuffled, columns.groups)[segment.start : segment.stop]
        if not reasons:
            return take_rows(columns, chosen)
        if self._quarantine is None:
            self._refuse(segment.row_group, reasons)
        bad = set(reasons).intersection(chosen.tolist())
        self._quarantine.add(self.files[index].path, {first + row: reasons[row] for row in bad})
        present = np.ones(rows, np.bool_)
        present[list(reasons)] = False
        return take_rows(columns, chosen, present[chosen])

    def _checked(self, number: int) -> Checked:
        return self._kept.get(number) or self._read_checked(number)

    def _read_checked(self, number: int) -> Checked:
        index, row_group, _ = self._places[number]
        table = storage.retry_once(lambda: self._read(index, row_group), self.files.path(index))
        self.files.check_unchanged(index)
        checked = Checked(*check_columns(table, self.dataset))
        rows = max(1, self.row_group_sizes[number])
        if num_bytes(checked.columns) / rows * sum(self.row_group_sizes) <= self._keep_bytes:
            self._kept[number] = checked
        return checked

    def _refuse(self, row_group: int, reasons: dict[int, str]) -> NoReturn:
        row = min(reasons)
        index, group, first = self._places[row_group]
        raise DataError(
            f"{self.files.path(index)}, row {first + row}: {reasons[row]} (row group {group} has {len(reasons)} bad "
            f"of {self.row_group_sizes[row_group]} rows); {HOW_TO_FIX}; {TO_QUARANTINE}"
        )

    def _nothing(self, num_rows: int) -> Block:
        """Return a block for an unreadable row group. None of its rows is `present`."""
        bags = [feature for feature in self.dataset.sparse_features if feature.multi_hot]
        num_one_hot = len(self.dataset.sparse_features) - len(bags) + len(self.dataset.side_tables)
        no_ids, no_weights = np.zeros(0, np.int32), np.zeros(0, np.float32)
        no_lists = [
            Lists(no_ids, np.zeros(num_rows + 1, np.int64), no_weights if bag.weighted else None) for bag in bags
        ]
        return Block(
            np.zeros((num_rows, len(self.dataset.dense_features)), np.float32),
            np.zeros((num_one_hot, num_rows), np.int32),
            no_lists,
            np.zeros((num_rows, *label_shape(self.dataset)), np.float32),
            np.zeros(num_rows, np.bool_),
        )

    def _read(self, index: int, row_group: int) -> pa.Table:
        with self._borrow(index) as file:
            try:
                return file.read_row_group(row_group, columns=self._columns, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                # an error of the disk: the bytes may be intact
                if getattr(error, "errno", None) is not None:
                    raise
                where = f"{self.files.path(index)}, row group {row_group}"
                raise ShardError(f"{where} cannot be read ({error}); {HOW_TO_FIX}") from error

    @contextmanager
    def _borrow(self, index: int) -> Iterator[pq.ParquetFile]:
        with self._lock:
            handles = self._idle.pop(index, [])
            file = handles.pop() if handles else None
            if handles:
                self._idle[index] = handles
        file = file or self._open(index)
        yield file
        with self._lock:  # after an error this line is not reached, and the handle is dropped
            self._idle.setdefault(index, []).append(file)
            self._idle.move_to_end(index)
            dropped = self._idle.popitem(last=False)[1] if len(self._idle) > MAX_IDLE_FILES else []
        for handle in dropped:
            handle.close()

    def _open(self, index: int) -> pq.ParquetFile:
        path, local = self.files.path(index), self.files.fetch(index)
        try:
            # No memory map: a disk error then raises an exception instead of SIGBUS, at equal
            # speed. No pre_buffer: passing work to pyarrow's IO threads costs a third of the rows/s
            # on one core.
            file = pq.ParquetFile(local, pre_buffer=False, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:
                raise
            raise ShardError(f"{path} is not a readable Parquet file ({error}); {HOW_TO_FIX}") from error
        check_layout(path, self.files[index], file, self.dataset)
        return file


def _warn_of_scattered_groups(groups: NDArray[np.int64]) -> None:
    """Log it if most rows of a row group are the only row of their group in it."""
    _, counts = np.unique(groups[groups != 0], return_counts=True)
    alone = int((counts == 1).sum() + (groups == 0).sum())
    if alone > len(groups) / 2:
        logger.warning(
            "data.reader.shuffle=groups: %d of %d rows of a row group share their data.group_column with no other row of it; "
            "sort the source by that column, or raise data.rows_per_row_group, and prepare it again",
            alone,
            len(groups),
        )


def take_rows(columns: Columns, rows: NDArray[np.int64], present: NDArray[np.bool_] | None = None) -> Block:
    """Return the rows with the numbers `rows` of a row group, in this order."""
    dense = np.take(np.ascontiguousarray(columns.dense.T), rows, axis=0)
    labels = np.take(columns.labels, rows, axis=0)
    lists = [column.take(rows, present) for column in columns.lists]
    if present is not None:
        dense[~present] = 0.0
        labels[~present] = 0.0
    groups = None if columns.groups is None else columns.groups[rows]
    return Block(dense, np.take(columns.one_hot, rows, axis=1), lists, labels, present, groups)
