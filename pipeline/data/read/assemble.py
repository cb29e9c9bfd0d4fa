"""Assemble Batches from pieces of Blocks, for the rows of several steps in one call.

All pieces are first copied into one Chunk. A Batch then takes a few numpy calls on it. Few large
calls are fast, because each call releases the GIL and acquires it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.dataset import Dataset
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.data.read.check_rows import ListRows, Lists, label_shape
from pipeline.data.read.decode import Block
from pipeline.data.read.multi_hot import sample_bags
from pipeline.data.read.target_columns import TargetColumns


class Piece(NamedTuple):
    """Rows [start, stop) of a block. They become the rows of a chunk from `offset` on."""

    block: Block
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """Rows of all streams, one stream after the other.

    Rows that are not `present` are padding or quarantined rows.
    """

    block: Block
    present: NDArray[np.bool_]


class _Column(NamedTuple):
    """The place of a feature's ids in a Block: lists[position], or one_hot[position], of which each
    id is expanded to `size` ids.
    """

    name: str
    cardinality: int
    is_list: bool
    position: int
    size: int


class SideColumns(Protocol):
    def complete(
        self,
        dense: NDArray[np.float32],
        one_hot: NDArray[np.signedinteger],
        lists: list[ListRows],
        present: NDArray[np.bool_],
    ) -> tuple[NDArray[np.float32], NDArray[np.signedinteger], list[ListRows]]:
        """Return the columns of a batch together with columns of side tables, in the data set's order.

        dense: [rows, columns], 0 for rows that are not `present`; one_hot: [features + side tables,
        present rows], the last are versions. Rows that are not `present` get zeros and empty lists.
        """


class BatchAssembler:
    """Makes Batches. Each step has `rows_per_stream` rows of each of `num_streams` streams."""

    def __init__(
        self,
        dataset: Dataset,
        multi_hot: dict[str, int],
        num_streams: int,
        rows_per_stream: int,
        targets: TargetColumns,
        with_groups: bool = False,
        side_columns: SideColumns | None = None,
    ) -> None:
        """side_columns: joins the columns that the blocks lack."""
        self._targets, self._with_groups = targets, with_groups
        self._labels_shape = label_shape(dataset)
        self.num_streams = num_streams
        self.rows_per_stream = rows_per_stream
        self.batch_size = num_streams * rows_per_stream
        self._side_columns, own = side_columns, dataset.without_side_columns
        self._num_dense = len(own.dense_features)
        self._num_lists = sum(feature.multi_hot for feature in own.sparse_features)
        self._num_one_hot = len(own.sparse_features) - self._num_lists + len(dataset.side_tables)
        self.keys = dataset.sparse_feature_names
        self._columns: list[_Column] = []
        positions = {True: itertools.count(), False: itertools.count()}
        for feature in dataset.sparse_features:
            position, size = next(positions[feature.multi_hot]), multi_hot.get(feature.name, 1)
            self._columns.append(_Column(feature.name, feature.cardinality, feature.multi_hot, position, size))
        self._is_weighted = bool(dataset.weighted_features)
        self._all_one_hot = all(column.size == 1 and not column.is_list for column in self._columns)

    def assemble(self, pieces: list[Piece], num_steps: int) -> Iterator[Batch]:
        """Yield the batches of `num_steps` steps. Pieces are in the order of their offsets.

        The rows of stream i begin at row i * num_steps * rows_per_stream.
        """
        rows_of_a_stream = num_steps * self.rows_per_stream
        chunk = self._lay_out(pieces, self.num_streams * rows_of_a_stream)
        streams = np.arange(self.num_streams)[:, None] * rows_of_a_stream + np.arange(self.rows_per_stream)
        for step in range(num_steps):
            yield self._batch(chunk, streams.reshape(-1) + step * self.rows_per_stream)

    def _lay_out(self, pieces: list[Piece], num_rows: int) -> Chunk:
        dense = np.zeros((num_rows, self._num_dense), np.float32)
        labels = np.zeros((num_rows, *self._labels_shape), np.float32)
        present = np.zeros(num_rows, np.bool_)
        id_dtype = pieces[0].block.one_hot.dtype if pieces else np.int32
        one_hot = np.zeros((self._num_one_hot, num_rows), id_dtype)
        for block, start, stop, offset in pieces:
            end = offset + stop - start
            dense[offset:end] = block.dense[start:stop]
            labels[offset:end] = block.labels[start:stop]
            present[offset:end] = True if block.present is None else block.present[start:stop]
            one_hot[:, offset:end] = block.one_hot[:, start:stop]
        lists = [_lay_out_lists(pieces, index, num_rows) for index in range(self._num_lists)]
        groups = _lay_out_groups(pieces, num_rows) if self._with_groups else None
        return Chunk(Block(dense, one_hot, lists, labels, groups=groups), present)

    def _batch(self, chunk: Chunk, rows: NDArray[np.int64]) -> Batch:
        present = chunk.present[rows]
        filled = rows if present.all() else rows[present]
        ids = np.take(chunk.block.one_hot, filled, axis=1)
        dense, lists = np.take(chunk.block.dense, rows, axis=0), [each.choose(rows) for each in chunk.block.lists]
        if self._side_columns is not None:
            dense, ids, lists = self._side_columns.complete(dense, ids, lists, present)
        lengths = np.empty((len(self._columns), self.batch_size), np.int32)
        if self._all_one_hot:
            lengths[:] = present
            values, weights = ids.astype(np.int64, copy=False).reshape(-1), None
            length_per_key = [len(filled)] * len(self._columns)
        else:
            values, length_per_key = self._bags(ids, lists, present, lengths)
            weights = torch.from_numpy(self._weights(lists, length_per_key)) if self._is_weighted else None
        sparse = keyed_jagged_tensor(
            self.keys,
            torch.from_numpy(values),
            torch.from_numpy(lengths.reshape(-1)),
            self.batch_size,
            length_per_key,
            weights,
        )
        targets = self._targets(np.take(chunk.block.labels, rows, axis=0), present)
        return Batch(
            torch.from_numpy(dense),
            sparse,
            torch.from_numpy(targets.labels),
            torch.from_numpy(targets.weights),
            None if chunk.block.groups is None else torch.from_numpy(np.take(chunk.block.groups, rows)),
            None if targets.present is None else torch.from_numpy(targets.present),
            None if targets.aside is None else torch.from_numpy(targets.aside),
        )

    def _bags(
        self,
        ids: NDArray[np.signedinteger],
        lists: list[ListRows],
        present: NDArray[np.bool_],
        lengths: NDArray[np.int32],
    ) -> tuple[NDArray[np.int64], list[int]]:
        """Return the values of all features, and the number of values of each feature.

        The function fills `lengths` [num_features, batch].
        """
        length_per_key = [
            lists[column.position].num_ids if column.is_list else ids.shape[1] * column.size for column in self._columns
        ]
        values = np.empty(sum(length_per_key), np.int64)
        begin = 0
        for column, count, column_lengths in zip(self._columns, length_per_key, lengths, strict=True):
            segment, begin = values[begin : begin + count], begin + count
            if column.is_list:
                lists[column.position].copy_ids(segment)
                column_lengths[:] = lists[column.position].lengths
            elif column.size == 1:
                segment[:] = ids[column.position]
                column_lengths[:] = present
            else:
                sample_bags(ids[column.position], column.name, column.cardinality, segment.reshape(-1, column.size))
                column_lengths[:] = present * np.int32(column.size)
        return values, length_per_key

    def _weights(self, lists: list[ListRows], length_per_key: list[int]) -> NDArray[np.float32]:
        """Return the weights of all values. Features without weights get weight 1."""
        weights, begin = np.ones(sum(length_per_key), np.float32), 0
        for column, count in zip(self._columns, length_per_key, strict=True):
            if column.is_list and lists[column.position].lists.weights is not None:
                lists[column.position].copy_weights(weights[begin : begin + count])
            begin += count
        return weights


def _lay_out_groups(pieces: list[Piece], num_rows: int) -> NDArray[np.int64]:
    """Return the groups of all rows. Padding and unreadable row groups get group 0."""
    groups = np.zeros(num_rows, np.int64)
    for block, start, stop, offset in pieces:
        if block.groups is not None:
            groups[offset : offset + stop - start] = block.groups[start:stop]
    return groups


def _lay_out_lists(pieces: list[Piece], index: int, num_rows: int) -> Lists:
    """Return the lists of all rows. Padding rows have empty lists."""
    lengths = np.zeros(num_rows, np.int64)
    parts: list[NDArray[np.integer]] = [np.empty(0, np.int32)]
    weights: list[NDArray[np.float32]] = []
    for block, start, stop, offset in pieces:
        lists = block.lists[index]
        offsets = lists.offsets[start : stop + 1]
        lengths[offset : offset + stop - start] = np.diff(offsets)
        parts.append(lists.ids[offsets[0] : offsets[-1]])
        if lists.weights is not None:
            weights.append(lists.weights[offsets[0] : offsets[-1]])
    ends = np.concatenate(([0], np.cumsum(lengths)))
    return Lists(np.concatenate(parts), ends, np.concatenate(weights) if weights else None)
