"""Encode lines of a stream as a training batch, with the vocabularies and transforms of a prepared
data set.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.checkpoint.vocabularies import read_values
from pipeline.config.data import DataConfig
from pipeline.config.retraining import UNITS, StreamConfig
from pipeline.data.dataset import Dataset, vocabulary_of
from pipeline.data.raw.blocks import Block, QuarantinedRow
from pipeline.data.raw.parse_cells import parse_timestamps
from pipeline.data.raw.rows import parse_block
from pipeline.data.read.batch import Batch, ExtraRows, keyed_jagged_tensor
from pipeline.data.read.target_columns import TargetColumns
from pipeline.data.read.value_index import index_values
from pipeline.data.targets import Target
from pipeline.extras.stream.joined import StreamJoins
from pipeline.extras.stream.source import Lines, Rows, TableRows
from pipeline.runtime.errors import RetrainingError
from pipeline.serving.artifact.raw_schema import schema_of
from pipeline.serving.artifact.writer import vocabulary_path
from pipeline.serving.scoring.raw_rows import EncodedRows, RowEncoder


class EncodedBatch(NamedTuple):
    """An encoded batch. event_time: the time of its newest row, in seconds since 1970; None if no
    column has times.
    """

    batch: Batch
    bad_rows: list[QuarantinedRow]
    event_time: float | None


def _features_of(dataset: Dataset) -> dict[str, list[int]]:
    """Return for each vocabulary (named by its feature) the numbers of the features that use its ids."""
    found: dict[str, list[int]] = {}
    for number, feature in enumerate(dataset.sparse_features):
        if feature.hash_size is None:
            found.setdefault(vocabulary_of(feature), []).append(number)
    return found


def _kind_of(part: Rows) -> tuple[tuple[str, ...], pa.Schema | None]:
    """Return the kind of rows in a part. Adjacent parts of one kind are parsed together."""
    return part.names, part.table.schema.remove_metadata() if isinstance(part, TableRows) else None


def _block(first: int, parts: Sequence[Rows]) -> Block:
    """Make a block from parts of one kind. first: the number in the batch of the parts' first row."""
    tables = [part.table.replace_schema_metadata() for part in parts if isinstance(part, TableRows)]
    if tables:
        table = pa.concat_tables(tables)
        return Block(first + 1, first, table.num_rows, table=table)
    lines = [
        line.replace(b"\n", b"\r")  # a line of Kafka may contain a line break
        for part in parts
        if isinstance(part, Lines)
        for line in part.lines
    ]
    return Block(first + 1, first, len(lines), b"".join(line + b"\n" for line in lines))


def _alike(tables: list[pa.Table]) -> list[pa.Table]:
    """Cast tables to the types of the first table, because files may store a text column plain or
    as a dictionary.
    """
    schema = tables[0].schema
    return [each if each.schema.equals(schema) else each.select(schema.names).cast(schema) for each in tables]


class LineEncoder:
    """Make the batches that the reader of a prepared data set would make from the same rows."""

    def __init__(
        self,
        data: DataConfig,
        dataset: Dataset,
        stream: StreamConfig,
        targets: Sequence[Target],
        split_ids: Callable[[KeyedJaggedTensor], KeyedJaggedTensor],
        growing: Collection[str] = (),
        aside: Sequence[str] = (),
        extra_rows: ExtraRows | None = None,
    ) -> None:
        """growing: vocabularies whose unknown values take_unknown() returns. extra_rows:
        adds rows to each batch. Raises RetrainingError if a stream cannot give the same rows as the
        prepared data set.
        """
        if dataset.negative_sampling:
            raise RetrainingError(
                "data.negative_sampling drops rows of a prepared split, but a stream has all "
                "rows: prepare the data set without it"
            )
        self._joins = StreamJoins(data, stream)
        self._layout = self._joins.layout
        self._time, self._scale = stream.event_time_column, UNITS[stream.event_time_unit]
        self._keys, self._split_ids, self._extra_rows = dataset.sparse_feature_names, split_ids, extra_rows
        schema = schema_of(dataset, self._keys, data.columns, data.synthetic_multi_hot)
        vocabularies = {
            feature.name: index_values(read_values(vocabulary_path(feature, data.path)))
            for feature in dataset.sparse_features
            if feature.hash_size is None
        }
        self._encoder = RowEncoder(schema, vocabularies)
        self._features = _features_of(dataset)
        self._cardinalities = {name: dataset.sparse_feature(name).cardinality for name in self._features}
        self._num_added = dict.fromkeys(self._features, 0)
        self._growing = [name for name in self._features if name in growing]
        self._encoder.added.note_unknown(number for name in self._growing for number in self._features[name])
        self._label_columns, self._num_dense = dataset.label_columns, len(dataset.dense_features)
        self._is_weighted = bool(dataset.weighted_features)
        self._targets = TargetColumns(dataset, list(targets), split="train", for_training=True, aside=aside)

    def encode(self, parts: Sequence[Rows], batch: int = 0) -> EncodedBatch:
        """Encode the rows of batch number `batch`.

        A row that cannot be read gets weight 0 and no ids, as in a prepared data set.
        """
        num_rows = sum(part.num_rows for part in parts)
        tables, kept, bad, first = [], [], [], 0
        for names, group in itertools.groupby(parts, _kind_of):
            self._joins.check(*names)
            block = _block(first, list(group))
            parsed = parse_block(self._layout, names[0] or self._layout.header or (), block)
            tables.append(parsed.table)
            kept.append(parsed.kept + first)
            bad += parsed.quarantined
            first += block.num_rows
        table = self._joins(pa.concat_tables(_alike(tables)).unify_dictionaries().combine_chunks())
        encoded = self._encoder.encode(table)
        read = np.concatenate(kept)
        bad += [replace(row, line=int(read[row.line - 1]) + 1) for row in encoded.bad_rows]
        return EncodedBatch(self._batch(table, encoded, read[encoded.kept], num_rows, batch), bad, self._newest(table))

    def use(self, values: Mapping[str, Sequence[str]]) -> None:
        """Replace the additional values of vocabularies by these values."""
        self._encoder.forget_added()
        self._num_added = dict.fromkeys(self._features, 0)
        self.add(values)
        self.take_unknown()

    def add(self, values: Mapping[str, Sequence[str]]) -> None:
        """Add values to vocabularies. Their ids follow the existing ids."""
        for name, own in values.items():
            first = self._cardinalities[name] + self._num_added[name]
            for number in self._features[name]:
                self._encoder.added.add(number, first, own)
            self._num_added[name] += len(own)

    def take_unknown(self) -> dict[str, set[str]]:
        """Return for each vocabulary the values without an id that encode() has found since the last call."""
        found = self._encoder.added.take_unknown()
        merged = {
            name: set[str]().union(*(found.get(number, ()) for number in self._features[name]))
            for name in self._growing
        }
        return {name: values for name, values in merged.items() if values}

    def nothing(self, num_rows: int) -> Batch:
        """Return a batch in which no row counts."""
        weights = torch.zeros(0) if self._is_weighted else None
        zeros = torch.zeros(len(self._keys) * num_rows, dtype=torch.int32)
        ids = torch.zeros(0, dtype=torch.int64)
        sparse = keyed_jagged_tensor(self._keys, ids, zeros, num_rows, [0] * len(self._keys), weights)
        return self._made(
            np.zeros((num_rows, self._num_dense), np.float32),
            sparse,
            self._no_labels(num_rows),
            np.zeros(num_rows, np.bool_),
        )

    def _no_labels(self, num_rows: int) -> np.ndarray:
        return np.zeros((num_rows, len(self._label_columns)), np.float32)

    def _batch(self, table: pa.Table, encoded: EncodedRows, rows: np.ndarray, num_rows: int, batch: int) -> Batch:
        """Make the batch. rows: the positions of the encoded rows among the batch's `num_rows`."""
        present = np.zeros(num_rows, np.bool_)
        present[rows] = True
        dense = np.zeros((num_rows, encoded.dense.shape[1]), np.float32)
        dense[rows] = encoded.dense.numpy()
        own = np.diff(encoded.offsets.numpy()).reshape(len(self._keys), len(rows))
        lengths = np.zeros((len(self._keys), num_rows), np.int32)
        lengths[:, rows] = own
        sparse = keyed_jagged_tensor(
            self._keys, encoded.values, torch.from_numpy(lengths.reshape(-1)), num_rows, own.sum(axis=1).tolist(), encoded.weights
        )  # fmt: skip
        columns = [
            np.nan_to_num(np.asarray(table[name], np.float64)[encoded.kept]).astype(np.float32)
            for name in self._label_columns
        ]
        labels = self._no_labels(num_rows)
        labels[rows] = np.stack(columns, axis=1)
        return self._made(dense, sparse, labels, present, batch)

    def _made(
        self, dense: np.ndarray, sparse: KeyedJaggedTensor, labels: np.ndarray, present: np.ndarray, batch: int = 0
    ) -> Batch:
        if self._extra_rows is not None:
            sparse = self._extra_rows(sparse, 0, batch)
        targets = self._targets(labels if labels.shape[1] > 1 else labels[:, 0].copy(), present)
        return Batch(
            torch.from_numpy(dense),
            self._split_ids(sparse),
            torch.from_numpy(targets.labels),
            torch.from_numpy(targets.weights),
            present=None if targets.present is None else torch.from_numpy(targets.present),
            aside=None if targets.aside is None else torch.from_numpy(targets.aside),
        )

    def _newest(self, table: pa.Table) -> float | None:
        if self._time is None or not table.num_rows:
            return None
        column = table[self._time].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        written = is_text and "-" in (column.drop_null()[0].as_py() if column.null_count < len(column) else "")
        try:
            newest = pc.max(parse_timestamps(column)).as_py()
        except pa.ArrowInvalid:  # the row is trained anyway
            return None
        return None if newest is None else newest * (UNITS["us"] if written else self._scale)
