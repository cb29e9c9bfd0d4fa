"""Encode typed rows: a categorical value becomes its number among the distinct values of its block.

A block has few distinct values compared with its rows, so all later work on text (counting,
sorting, joining) uses distinct values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.columns import LabelConfig, NegativeSamplingConfig, SequenceConfig
from pipeline.config.data import BucketsConfig, DataConfig, IdsConfig
from pipeline.config.transforms import TransformConfig, make_transforms
from pipeline.data.dataset import GROUP_COLUMN, weights_column
from pipeline.data.prepare.row_hashes import RowHashes
from pipeline.data.raw.dense_transforms import Transform
from pipeline.data.raw.derived import derive
from pipeline.data.raw.hashing import hash_ids, hash_text
from pipeline.data.raw.layout import Layout, columns_of
from pipeline.data.raw.sequences import cut_lists
from pipeline.data.raw.value_types import plain, to_text
from pipeline.data.raw.weighted import split_elements
from pipeline.runtime.errors import DataError, did_you_mean

STANDARDIZE = "standardize"
# Staged next to the features; no feature has these names.
TIMESTAMP_COLUMN = "\0timestamp"
TRUTH_COLUMN = "\0truth "  # and the name of the label
# uint64, of the values of all columns that are read; for splits with given files
HASH_COLUMN = "\0hash"


@dataclass(frozen=True)
class Features:
    """The order of the features in encoded rows.

    Features are numbered in the order of `sparse`: first one-hot features, then multi-hot features;
    bucketed ones follow.
    """

    label: str
    dense: list[str]
    one_hot: list[str]
    multi_hot: list[str]
    ids: dict[str, IdsConfig]
    dense_transform: str  # of dense columns that `transforms` does not name
    timestamp: str | None
    list_separator: str
    row_hashes: bool = False
    group: str | None = None
    buckets: dict[str, BucketsConfig] = field(default_factory=dict)  # of numbers that are no dense features
    transforms: dict[str, str] = field(default_factory=dict)
    null_values: tuple[str, ...] = ()

    labels: dict[str, LabelConfig] = field(default_factory=dict)  # with the main one, `label`; that alone is binary
    weight: str | None = None
    negative_sampling: NegativeSamplingConfig | None = None
    sequences: dict[str, SequenceConfig] = field(default_factory=dict)  # of multi_hot; with every length and side
    derived: dict[str, TransformConfig] = field(default_factory=dict)  # columns that are made of others
    derived_kinds: dict[str, str] = field(default_factory=dict)
    weighted: list[str] = field(default_factory=list)  # of multi_hot
    vectors: dict[str, int] = field(default_factory=dict)  # columns whose numbers are dense features
    # Columns of shards that are stored once, by the column of shards that says which version a row
    # has (dataset.SideTable). `noted`: further whole numbers that are staged for them.
    stored_once: dict[str, list[str]] = field(default_factory=dict)
    noted: list[str] = field(default_factory=list)

    def kind_of(self, name: str) -> str:
        """Return the kind of transform that a dense column gets."""
        return self.transforms.get(name, self.dense_transform)

    @property
    def sparse(self) -> list[str]:
        return [*self.one_hot, *self.multi_hot]

    @property
    def shared_ids(self) -> dict[int, list[int]]:
        """Return the mapping from the number of a feature that shares its ids to the numbers of all
        features that use these ids.
        """
        groups: dict[str, list[str]] = {}
        for name, sequence in self.sequences.items():
            if sequence.shares is not None:
                groups.setdefault(sequence.shares, [sequence.shares]).append(name)
        numbers = {name: number for number, name in enumerate(self.sparse)}
        members = [[numbers[name] for name in group] for group in groups.values()]
        return {number: group for group in members for number in group}

    @property
    def label_types(self) -> dict[str, pa.DataType]:
        """Return the types of all labels and of the weight in shards."""
        types = {"binary": pa.int8(), "ordinal": pa.int16(), "classes": pa.int16(), "regression": pa.float32()}
        found = {name: types[label.kind] for name, label in self.labels.items()}
        return found | ({self.weight: pa.float32()} if self.weight else {})


def features_of(config: DataConfig, layout: Layout) -> Features:
    """Return the features of a config.

    Raises DataError if data.feature_ids names no categorical column.
    """
    columns = columns_of(config)
    sparse, sequences = [*columns.sparse, *columns.lists], columns.sequences
    for name in config.feature_ids:
        if name not in sparse:
            raise DataError(f"data.feature_ids names {name!r}, not a categorical column{did_you_mean(name, sparse)}")
        if name in sequences and sequences[name].shares is not None:
            raise DataError(
                f"data.feature_ids.{name}: the sequence has the ids of {sequences[name].shares!r}; set "
                f"data.feature_ids.{sequences[name].shares}, or leave out data.columns.sequence.{name}.shares"
            )
    kinds = config.dense_transforms | dict.fromkeys(layout.columns.vector_features, "none")
    owners = {name: sequence.shares or name for name, sequence in sequences.items()}
    return Features(
        label=columns.label,
        dense=[name for name in columns.dense if name not in config.buckets],
        one_hot=columns.sparse,
        multi_hot=columns.lists,
        sequences=sequences,
        ids={name: config.feature_ids.get(owners.get(name, name), config.ids) for name in sparse},
        dense_transform=config.dense_transform,
        timestamp=layout.time_column,
        derived=make_transforms(config.transforms),
        derived_kinds={name: str(each["kind"]) for name, each in config.transforms.items()},
        list_separator=columns.list_separator,
        null_values=tuple(columns.null_values),
        transforms={name: kind for name, kind in kinds.items() if kind != config.dense_transform},
        row_hashes=config.split.kind == "given",
        group=config.group_column,
        buckets={name: config.buckets[name] for name in columns.dense if name in config.buckets},
        labels=columns.all_labels,
        weight=columns.weight,
        negative_sampling=config.negative_sampling,
        weighted=columns.weighted,
        vectors=layout.columns.vectors,
    )


@dataclass(frozen=True)
class EncodedBlock:
    """An encoded block.

    `rows`: labels and weight as in Features.label_types, dense float32, codes uint16 (multi-hot:
    lists of uint32) with 0 for a missing value, and a list of float32 next to each weighted
    feature. Columns that get buckets or are standardized are float64 as read, NaN if missing.
    num_negative: the number of negative values in dense columns whose transform replaces them by 0.
    A feature has `num_values` entries, and its code c means entry c - 1. `values` and `counts` hold
    the entries of all features. For a hashed feature the value of an entry is its id as a decimal
    text.
    """

    rows: pa.RecordBatch
    values: pa.Array
    counts: np.ndarray
    num_values: list[int]
    num_lookups: list[int]
    num_negative: dict[str, int] = field(default_factory=dict)


def encode_block(
    features: Features, table: pa.Table, probabilities: Mapping[str, np.ndarray] | None = None
) -> EncodedBlock:
    """Encode a block. probabilities: label -> the teacher's probabilities [rows], for a generated source."""
    table = derive(table, features.derived, features.null_values, features.vectors)
    labels = {name: label_values(table[name]) for name in features.label_types}
    arrays = [pa.array(labels[name].astype(kind.to_pandas_dtype())) for name, kind in features.label_types.items()]
    negative: dict[str, int] = {}
    for name in features.dense:
        numbers = table[name].to_numpy().astype(np.float64)  # missing values become NaN
        if features.kind_of(name) == "log1p" and (count := int((numbers < 0).sum())):
            negative[name] = count
        arrays.append(pa.array(_staged_numbers(numbers, features.kind_of(name))))
    in_buckets = [pa.array(table[name].to_numpy().astype(np.float64)) for name in features.buckets]  # NaN: missing
    values, counts, lookups = [], [], []
    hashes = RowHashes(len(table)) if features.row_hashes else None
    if hashes:
        for values_of_label in labels.values():
            hashes.add_numbers(values_of_label)
        for name in (*features.dense, *features.buckets):
            hashes.add_numbers(table[name].to_numpy())
    of_weights: dict[str, pa.Array] = {}
    for name in features.sparse:
        codes, distinct, lengths, weights = encode_values(features, name, table[name])
        if hashes:
            hashes.add_texts(codes, distinct, lengths, weights)
        if (ids := features.ids[name]).kind == "hash":
            distinct = pa.array(hash_ids(distinct, ids.hash_size or 0, ids.hash_seed)).cast(pa.string())
        values.append(distinct)
        counts.append(np.bincount(codes, minlength=len(distinct) + 1)[1:])
        lookups.append(len(codes))
        if lengths is None:
            arrays.append(pa.array(codes.astype(np.uint16)))
        else:
            arrays.append(_lists_of(codes.astype(np.uint32), lengths))
        if weights is not None and lengths is not None:
            of_weights[weights_column(name)] = _lists_of(weights, lengths)
    of_joins = {name: table[name].combine_chunks() for name in (*features.stored_once, *features.noted)}
    arrays += [*in_buckets, *of_weights.values(), *of_joins.values()]
    names = [*labels, *features.dense, *features.sparse, *features.buckets, *of_weights, *of_joins]
    if features.timestamp:
        arrays.append(table[features.timestamp].combine_chunks())
        names.append(TIMESTAMP_COLUMN)
    for name, truth in (probabilities or {}).items():
        arrays.append(pa.array(truth))
        names.append(TRUTH_COLUMN + name)
    if features.group:
        arrays.append(pa.array(group_ids(table[features.group])))
        names.append(GROUP_COLUMN)
    if hashes:
        arrays.append(pa.array(hashes.finish()))
        names.append(HASH_COLUMN)
    return EncodedBlock(
        rows=pa.RecordBatch.from_arrays(arrays, names=names),
        values=pa.concat_arrays([pa.array([], pa.string()), *values]),
        counts=np.concatenate([np.zeros(0, np.int64), *counts]),
        num_values=[len(distinct) for distinct in values],
        num_lookups=lookups,
        num_negative=negative,
    )


def _lists_of(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def label_values(column: pa.ChunkedArray) -> np.ndarray:
    """Return [rows] float64. A missing value is 0; it is allowed only if another label masks the
    row.
    """
    values: np.ndarray = column.to_numpy()
    return np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf) if np.isnan(values).any() else values


def group_ids(column: pa.ChunkedArray) -> np.ndarray:
    """Return [rows] int64: a hash of the value as text, or 0 if the value is missing."""
    codes, distinct = codes_of(plain(column).combine_chunks())
    return np.concatenate([np.zeros(1, np.int64), hash_text(distinct, 0).view(np.int64)])[codes]


class EncodedValues(NamedTuple):
    """Codes of values (0 means missing), and the distinct values of codes 1, 2, ... as text.

    For a multi-hot feature there is also the number of codes per row, and for a weighted feature a
    float32 per code.
    """

    codes: np.ndarray
    distinct: pa.Array
    lengths: np.ndarray | None
    weights: np.ndarray | None


def encode_values(features: Features, name: str, column: pa.ChunkedArray) -> EncodedValues:
    values = column.combine_chunks()
    lengths = weights = None
    if name in features.multi_hot:
        values, lengths = _flatten(values, features.list_separator)
        if name in features.sequences:
            values, lengths = cut_lists(values, lengths, features.sequences[name])
        if name in features.weighted:
            values, numbers = split_elements(values)
            weights = numbers.astype(np.float32)
    return EncodedValues(*codes_of(values, features.null_values), lengths, weights)


def _staged_numbers(values: np.ndarray, kind: str) -> np.ndarray:
    """Return float64 unchanged if the transform must be learned from all training rows first.
    Otherwise return the transformed values.
    """
    return values if kind == STANDARDIZE else Transform(kind)(values)


def dense_values(column: pa.ChunkedArray, transform: Transform) -> np.ndarray:
    """Return [rows] float32; see Transform."""
    return transform(column.to_numpy().astype(np.float64))  # missing values become NaN


def _flatten(column: pa.Array, separator: str) -> tuple[pa.Array, np.ndarray]:
    """Return all values of a list column in one array, and each row's number of values. A missing list is empty."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        column = pc.split_pattern(column, separator)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return column.flatten(), lengths


def codes_of(column: pa.Array, null_values: Sequence[str] = ()) -> tuple[np.ndarray, pa.Array]:
    """Return codes from 1 on (0 means missing), and their distinct values as text.

    Empty text and the texts in `null_values` are missing values.
    """
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    codes = pc.fill_null(column.indices, -1).to_numpy() + 1
    distinct = to_text(column.dictionary)
    # In Parquet sources and lists; CSV reads them as null.
    missing = pc.is_in(distinct, pa.array(["", *null_values])).to_numpy(zero_copy_only=False)
    if missing.any():
        kept = np.concatenate([[0], np.where(missing, 0, np.cumsum(~missing))])
        codes = kept[codes]
        distinct = distinct.filter(pa.array(~missing))
    return codes, distinct
