"""Encode raw rows as the dense values and ids that the model was trained on.

Parsing, transforms, codes and hashes are prepare's functions. Only the join of values with their
ids differs (feature_ids.py). Valid rows are encoded by faster code with the same result: a few rows
as Python values, many rows column by column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipeline.config.columns import ColumnsConfig, SequenceConfig
from pipeline.config.data import IdsConfig
from pipeline.data.prepare.encode import Features, dense_values, encode_values
from pipeline.data.raw.blocks import Block, QuarantinedRow
from pipeline.data.raw.dense_transforms import Transform, bucket_column, bucket_texts, transform_of
from pipeline.data.raw.derived import derive
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.parse_cells import LARGEST_FLOAT32
from pipeline.data.raw.rows import parse_block
from pipeline.data.raw.sequences import cut_list
from pipeline.data.raw.weighted import weights_of_lists
from pipeline.data.read.multi_hot import sample_bags
from pipeline.runtime.errors import DataError, ServingError, did_you_mean
from pipeline.serving.artifact.raw_schema import DENSE, MULTI_HOT, SPARSE, RawFeature, RawSchema
from pipeline.serving.scoring.feature_ids import MIN_ROWS, AddedIds, FeatureIds, is_read
from pipeline.serving.scoring.scorer import ColumnLists, Rows, with_text

FEW_ROWS = 512  # of a table: more are as quick column by column


@dataclass(frozen=True)
class EncodedRows:
    """dense [n, num_dense] float32; values, offsets and weights as in a KeyedJaggedTensor.

    `kept`: the numbers of the rows that were encoded, from 0; the other rows are bad.
    """

    dense: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    kept: NDArray[np.int64]
    bad_rows: list[QuarantinedRow]
    weights: torch.Tensor | None = None

    @property
    def ids(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the arguments of TableLookup.pooled."""
        return self.values, self.offsets, self.weights


class RowEncoder:
    """Encodes rows. `vocabularies`: feature -> result of value_index.index_values, if the feature is not hashed."""

    def __init__(self, schema: RawSchema, vocabularies: Mapping[str, pa.Table], ids: FeatureIds | None = None) -> None:
        """ids: the lookup of the schema's features, instead of one that is made of the vocabularies."""
        self.schema = schema
        self._in_buckets, self._derived = schema.in_buckets, schema.derived
        raw = {
            kind: [name for name, each in schema.columns.items() if each == kind] for kind in (DENSE, SPARSE, MULTI_HOT)
        }
        one_hot = [each.name for each in schema.features if not each.multi_hot and each.boundaries is None]
        bags = [each.name for each in schema.features if each.multi_hot and each.sequence is None]
        self._sequences = {
            each.name: SequenceConfig(each.sequence.max_length, each.sequence.keep, beside=each.sequence.beside)
            for each in schema.features
            if each.sequence is not None
        }
        multi_hot = [*bags, *self._sequences]
        columns = ColumnsConfig(
            label="", dense=raw[DENSE], sparse=raw[SPARSE],
            multi_hot=[name for name in raw[MULTI_HOT] if name not in self._sequences],
            sequence={name: _unresolved(each) for name, each in self._sequences.items()}, list_separator=schema.list_separator, null_values=list(schema.null_values),
            weighted=[feature.name for feature in schema.features if feature.weighted], vectors=schema.vectors,
        )  # fmt: skip
        self.layout = Layout(columns, "parquet")
        self._features = Features(
            label="", dense=schema.dense, one_hot=one_hot, multi_hot=multi_hot, timestamp=None,
            ids={feature.name: IdsConfig() for feature in schema.features}, dense_transform=schema.dense_transform,
            list_separator=schema.list_separator, null_values=tuple(schema.null_values), sequences=self._sequences,
            weighted=columns.weighted,
        )  # fmt: skip
        self._transforms = [transform_of(name, schema.dense_transform, schema.dense_columns) for name in schema.dense]
        self._ids = ids or FeatureIds(schema.features, vocabularies, schema.null_values)
        self._num_numbers = len(schema.dense) + len(self._in_buckets)
        self._names = [*schema.dense, *self._in_buckets, *one_hot, *multi_hot]  # of ColumnLists
        self._positions = [self._names.index(feature.name, len(schema.dense)) for feature in schema.features]
        self._has_bags = any(feature.multi_hot or feature.bag_size > 1 for feature in schema.features)
        self._is_made = bool(schema.transforms or schema.vectors)  # features are computed from raw columns
        # in the order of schema_of(self.layout.columns)
        self._raw_names = [*raw[DENSE], *raw[SPARSE], *self.layout.columns.raw_lists]
        self._num_raw_numbers = len(raw[DENSE])
        own = raw[SPARSE]
        self._columns_of_features = [own.index(each.name) for each in schema.features if each.name in own]
        self._simple: pa.Schema | None = None  # the last one whose tables may become ColumnLists
        self._whole: pa.Schema | None = None  # the last one whose columns are read as they are

    @property
    def added(self) -> AddedIds:
        """Return the values that have ids in addition to the vocabularies, by number of the schema's feature."""
        return self._ids.added

    def ids_of(self, feature: str, values: Sequence[str]) -> NDArray[np.int64]:
        """Return [len(values)]: the ids of one feature's values, 0 for an unknown value."""
        number = [each.name for each in self.schema.features].index(feature)
        return self._ids.look_up(np.full(len(values), number), pa.array(values, pa.large_string()))

    def forget_added(self) -> None:
        self._ids.forget_added()

    def part(self, features: Collection[str], dense: Collection[str]) -> RowEncoder:
        """Return the encoder of some features and dense columns. It shares the vocabularies and
        added values.
        """
        positions = [number for number, each in enumerate(self.schema.features) if each.name in features]
        return RowEncoder(self.schema.of_features(features, dense), {}, self._ids.part(positions))

    @property
    def raw_names(self) -> list[str]:
        """Return the names of the raw columns, in the order of ColumnLists."""
        return self._raw_names

    def encode(self, rows: Rows) -> EncodedRows:
        """Encode rows; ColumnLists have the columns of schema_of(self.layout.columns).

        Raises ServingError if a column is missing, or of a wrong type.
        """
        if rows.num_rows >= MIN_ROWS and (encoded := self._encode_whole(rows)) is not None:
            return encoded
        few = rows if isinstance(rows, ColumnLists) else self._few(rows)
        if few is not None and self._is_made:
            few = self._derive_few(few)
        encoded = None if few is None else self._encode_few(few)
        if encoded is not None:
            return encoded
        return self.encode_as_prepare(rows.to_table() if isinstance(rows, ColumnLists) else rows)

    def _encode_whole(self, rows: Rows) -> EncodedRows | None:
        """Encode each feature as a complete column. Return None if a column cannot be read so, or a row is bad."""
        names, num_dense = self._raw_names, len(self.schema.dense)
        if not self._ids.reads_columns or self._is_made:
            return None
        if isinstance(rows, ColumnLists):
            columns = [pa.array(column, pa.string()) for column in rows.columns[num_dense:]]
            numbers = np.array(rows.columns[:num_dense], np.float64)
        else:
            if self._whole is None or not rows.schema.equals(self._whole):
                if not self._has_whole(rows.schema):
                    return None
                self._whole = rows.schema
            columns = [_chunk_of(rows[name]) for name in names[num_dense:]]
            numbers = np.empty((num_dense, rows.num_rows), np.float64)
            for place, name in enumerate(self.schema.dense):
                numbers[place] = rows[name].to_numpy()  # missing values become NaN
        numbers = numbers.reshape(num_dense, rows.num_rows)
        if (np.abs(numbers) > LARGEST_FLOAT32).any():
            return None
        ids = self._ids.of_arrow([columns[place] for place in self._columns_of_features])
        if ids is None:
            return None
        ends = torch.arange(len(ids) + 1)
        return EncodedRows(
            torch.from_numpy(self._dense(numbers)), torch.from_numpy(ids), ends, np.arange(rows.num_rows), []
        )

    def _has_whole(self, schema: pa.Schema) -> bool:
        names, num_dense = self._raw_names, len(self.schema.dense)
        if any(schema.names.count(name) != 1 for name in names):
            return False
        kinds = [schema.field(name).type for name in names]
        return all(pa.types.is_floating(kind) or pa.types.is_integer(kind) for kind in kinds[:num_dense]) and all(
            is_read(kind) for kind in kinds[num_dense:]
        )

    def _few(self, rows: pa.Table) -> ColumnLists | None:
        """Return the rows as Python values; None if only encode_as_prepare can read them (many rows, other types)."""
        if rows.num_rows > FEW_ROWS:
            return None
        if self._simple is None or not rows.schema.equals(self._simple):
            rows = with_text(rows, self._raw_names[self._num_raw_numbers :])
            if not self._is_simple(rows.schema):
                return None
            self._simple = rows.schema
        try:
            schema = pa.schema([rows.schema.field(name) for name in self._raw_names]) if self._is_made else rows.schema
            return ColumnLists(schema, [rows[name].to_pylist() for name in self._raw_names], rows.num_rows)
        except UnicodeDecodeError:
            return None

    def _is_simple(self, schema: pa.Schema) -> bool:
        names, num_dense = self._raw_names, self._num_raw_numbers
        if any(schema.names.count(name) != 1 for name in names):
            return False
        kinds = [schema.field(name).type for name in names]
        lists = [kind for name, kind in zip(names, kinds, strict=True) if name in self.layout.columns.lists]
        vectors = [schema.field(name).type for name in self.schema.vectors]
        return (
            all(pa.types.is_floating(kind) or pa.types.is_integer(kind) for kind in kinds[:num_dense])
            and all(_is_text(kind) for kind in kinds[num_dense : len(names) - len(lists) - len(vectors)])
            and all(pa.types.is_list(kind) and _is_text(kind.value_type) for kind in lists)
            and all(pa.types.is_list(kind) and pa.types.is_floating(kind.value_type) for kind in vectors)
        )

    def _derive_few(self, rows: ColumnLists) -> ColumnLists | None:
        """Convert raw columns to the columns that become features. Return None if a row is bad."""
        numbers = np.array(rows.columns[: self._num_raw_numbers], np.float64)
        if (np.abs(numbers) > LARGEST_FLOAT32).any():
            return None
        try:
            table = derive(rows.to_table(), self._derived, self.schema.null_values, self.schema.vectors)
            table = table.select(self._names)
            return ColumnLists(table.schema, [column.to_pylist() for column in table.columns], rows.num_rows)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, UnicodeDecodeError):
            return None

    def _encode_few(self, rows: ColumnLists) -> EncodedRows | None:
        """Encode a few rows. Return None if a row is bad; encode_as_prepare then finds the row and the reason."""
        if self._has_uneven(rows):
            return None
        num_rows, num_dense = rows.num_rows, len(self.schema.dense)
        # None becomes NaN
        numbers = np.array(rows.columns[: self._num_numbers], np.float64).reshape(self._num_numbers, num_rows)
        if (np.abs(numbers) > LARGEST_FLOAT32).any():
            return None
        dense = self._dense(numbers[:num_dense])
        buckets = [bucket_texts(*column) for column in zip(numbers[num_dense:], self._in_buckets.values(), strict=True)]
        all_columns = [*rows.columns[:num_dense], *buckets, *rows.columns[self._num_numbers :]]
        columns = [all_columns[position] for position in self._positions]
        kept: NDArray[np.int64] = np.arange(num_rows)
        if not self._has_bags:
            ids, ends = self._ids.of_columns(columns), np.arange(len(columns) * num_rows + 1)
            return EncodedRows(torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(ends), kept, [])
        for position, feature in enumerate(self.schema.features):
            if (sequence := self._sequences.get(feature.name)) is not None:
                columns[position] = [cut_list(bag or (), sequence) for bag in columns[position]]
        if (weights := self._split_weights(columns)) is None:
            return None
        lengths = [
            np.array([len(bag or ()) for bag in column]) if feature.multi_hot else None
            for feature, column in zip(self.schema.features, columns, strict=True)
        ]
        columns = [
            column if counts is None else [value for bag in column for value in bag or ()]
            for counts, column in zip(lengths, columns, strict=True)
        ]
        by_feature = _parts(self._ids.of_columns(columns), [len(column) for column in columns])
        bags = [
            bag_of(feature, ids, counts, weights.get(feature.name))
            for feature, ids, counts in zip(self.schema.features, by_feature, lengths, strict=True)
        ]
        return _joined(dense, bags, kept, [])

    def _split_weights(self, columns: list[Sequence[Any]]) -> dict[str, NDArray[np.float32]] | None:
        """Split the columns of weighted features: the ids stay, the weights are returned; None if a row is bad."""
        weights: dict[str, NDArray[np.float32]] = {}
        for position, feature in enumerate(self.schema.features):
            if feature.weighted:
                if (parts := weights_of_lists(columns[position])) is None:
                    return None
                columns[position], of_feature = parts
                weights[feature.name] = np.array(of_feature, np.float64).astype(np.float32)
        return weights

    def _has_uneven(self, rows: ColumnLists) -> bool:
        """Return True if the length of a sequence differs from the length of the sequence that it describes."""
        for name, sequence in self._sequences.items():
            if sequence.beside is not None:
                own, leader = (rows.columns[self._names.index(each)] for each in (name, sequence.beside))
                if any(len(a or ()) != len(b or ()) for a, b in zip(own, leader, strict=True)):
                    return True
        return False

    def _dense(self, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return [rows, columns] from [columns, rows]."""
        if not self.schema.dense_columns:
            return np.ascontiguousarray(Transform(self.schema.dense_transform)(numbers).T)
        return np.stack([transform(row) for transform, row in zip(self._transforms, numbers, strict=True)], axis=1)

    def encode_as_prepare(self, rows: pa.Table) -> EncodedRows:
        """Encode rows by the functions of prepare alone. encode() gives the same result faster."""
        table = self._needed(rows)
        try:
            parsed = parse_block(self.layout, tuple(table.column_names), Block(1, 0, table.num_rows, table=table))
            values = derive(parsed.table, self._derived, self.schema.null_values, self.schema.vectors)
            dense = np.empty((len(parsed.kept), len(self.schema.dense)), np.float32)
            for position, name in enumerate(self.schema.dense):
                dense[:, position] = dense_values(values[name], self._transforms[position])
            bags = self._bags(self._with_buckets(values))
        except (DataError, pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise ServingError(f"the rows cannot be read: {' '.join(str(error).split())[:300]}") from None
        return _joined(dense, bags, parsed.kept, parsed.quarantined)

    def _with_buckets(self, table: pa.Table) -> pa.Table:
        """Replace each number that is looked up by its bucket by the bucket's number, as text."""
        for name, boundaries in self._in_buckets.items():
            column = bucket_column(table[name], boundaries)
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return table

    def _needed(self, rows: pa.Table) -> pa.Table:
        """Return the columns of the schema. A column without any value gets a type that allows missing values."""
        names, columns = rows.column_names, self.schema.columns
        if missing := [name for name in columns if name not in names]:
            listed = ", ".join(f"{name!r}{did_you_mean(name, names)}" for name in missing[:5])
            raise ServingError(f"the rows lack {len(missing)} of {len(columns)} columns: {listed}")
        if doubled := [name for name in columns if names.count(name) > 1]:
            raise ServingError(f"the rows have {names.count(doubled[0])} columns {doubled[0]!r}: send one of that name")
        table = rows.select(list(columns))
        for position, (name, kind) in enumerate(columns.items()):
            if wanted := _type_of_nothing(table.schema.field(name).type, kind):
                table = table.set_column(position, name, table[name].cast(wanted))
        return table.combine_chunks()

    def _bags(self, table: pa.Table) -> list[Bag]:
        """Return for each feature the ids of all rows, one after the other, and the number of ids per row."""
        names = [feature.name for feature in self.schema.features]
        encoded = [encode_values(self._features, name, table[name]) for name in names]
        distinct = [each.distinct.cast(pa.large_string()) for each in encoded]
        sizes = [len(values) for values in distinct]
        ids = self._ids.look_up(np.repeat(np.arange(len(names)), sizes), pa.chunked_array(distinct, pa.large_string()).combine_chunks())  # fmt: skip
        bags = []
        for feature, each, found in zip(self.schema.features, encoded, _parts(ids, sizes), strict=True):
            own = np.concatenate([np.zeros(1, np.int64), found])[each.codes]
            bags.append(bag_of(feature, own, each.lengths, each.weights))
        return bags


def _chunk_of(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _unresolved(sequence: SequenceConfig) -> SequenceConfig:
    """Return the sequence as in data.columns. A sequence that describes another one has its length and end."""
    return sequence if sequence.beside is None else SequenceConfig(beside=sequence.beside)


class Bag(NamedTuple):
    """The ids of all rows, the number of ids per row, and their weights; None: each id has weight 1."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None


def _parts(ids: NDArray[np.int64], sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """Split ids into parts of these sizes. Return no parts if there are no sizes (np.split would return one part)."""
    return np.split(ids, np.cumsum(sizes)[:-1]) if sizes else []


def bag_of(
    feature: RawFeature,
    ids: NDArray[np.int64],
    lengths: NDArray[np.integer] | None,
    weights: NDArray[np.float32] | None = None,
) -> Bag:
    """Return the Bag of a feature. `lengths` is None if each row has one id."""
    if lengths is not None:
        return Bag(ids, lengths.astype(np.int64), weights)
    if feature.bag_size == 1:
        return Bag(ids, np.ones(len(ids), np.int64))
    bags = np.empty((len(ids), feature.bag_size), np.int64)
    sample_bags(ids, feature.name, feature.cardinality, bags)
    return Bag(bags.reshape(-1), np.full(len(ids), feature.bag_size, np.int64))


def join_bags(bags: Sequence[Bag]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (values, offsets, weights) of all features; with weights if any feature has weights."""
    ids = np.concatenate([np.zeros(0, np.int64), *(bag.ids for bag in bags)])
    ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(bag.lengths for bag in bags)]))
    weights = None
    if any(bag.weights is not None for bag in bags):
        own = [np.ones(len(bag.ids), np.float32) if bag.weights is None else bag.weights for bag in bags]
        weights = torch.from_numpy(np.concatenate(own))
    return torch.from_numpy(ids), torch.from_numpy(ends), weights


def _joined(
    dense: NDArray[np.float32], bags: Sequence[Bag], kept: NDArray[np.int64], bad_rows: list[QuarantinedRow]
) -> EncodedRows:
    ids, ends, weights = join_bags(bags)
    return EncodedRows(torch.from_numpy(dense), ids, ends, kept, bad_rows, weights)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _type_of_nothing(kind: pa.DataType, column: str) -> pa.DataType | None:
    """Return the type for a column that a JSON reader gave only nulls; None if the column has a type already."""
    if pa.types.is_null(kind):
        return {DENSE: pa.float64(), SPARSE: pa.string(), MULTI_HOT: pa.list_(pa.string())}[column]
    if pa.types.is_list(kind) and pa.types.is_null(kind.value_type):
        return pa.list_(pa.string())
    return None
