"""Turn raw rows, as `prepare` reads them, into the dense values and ids that the model was trained on.

Parsing, transforms, codes and hashes are the functions that prepare uses (data.rows, data.encode, data.hashing); only
the join of values with their ids, which prepare leaves to DuckDB for all rows at once, is another one (data.value_index).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipeline.checks import did_you_mean
from pipeline.data.config import ColumnsConfig, IdsConfig
from pipeline.data.encode import Features, dense_values, encode_values
from pipeline.data.hashing import hash_ids
from pipeline.data.layout import Layout
from pipeline.data.multi_hot import draw_bags
from pipeline.data.rows import QuarantinedRow, parse_block
from pipeline.data.source import Block
from pipeline.data.value_index import ValueIndex, hashes_of

DENSE, SPARSE, MULTI_HOT = "dense", "sparse", "multi_hot"


@dataclass(frozen=True)
class RawFeature:
    """A categorical column. `hash_size` None: its values are in the vocabulary. `bag_size` > 1: ids that are drawn from
    a one-hot id (data.multi_hot)."""

    name: str
    cardinality: int
    multi_hot: bool
    bag_size: int = 1
    hash_size: int | None = None
    hash_seed: int = 0


@dataclass(frozen=True)
class RawSchema:
    """What raw rows are and become; `features` are in the order of the batch's keys."""

    dense: list[str]
    features: list[RawFeature]
    dense_transform: str
    list_separator: str

    @property
    def columns(self) -> dict[str, str]:
        """Column -> dense, sparse or multi_hot."""
        kinds = dict.fromkeys(self.dense, DENSE)
        return kinds | {one.name: MULTI_HOT if one.multi_hot else SPARSE for one in self.features}


@dataclass(frozen=True)
class EncodedRows:
    """dense [n, num_dense] float32; values int64 and offsets [num_features * n + 1] int64 as a KeyedJaggedTensor has them.

    `kept` are the numbers of the rows that were encoded, from 0, of those that were given; the others are bad.
    """

    dense: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    kept: NDArray[np.int64]
    bad_rows: list[QuarantinedRow]


class RowEncoder:
    """`vocabularies`: feature -> its values, for those that are not hashed."""

    def __init__(self, schema: RawSchema, vocabularies: Mapping[str, ValueIndex]) -> None:
        self.schema, self._vocabularies = schema, vocabularies
        one_hot = [one.name for one in schema.features if not one.multi_hot]
        multi_hot = [one.name for one in schema.features if one.multi_hot]
        columns = ColumnsConfig(
            label="", dense=schema.dense, sparse=one_hot, multi_hot=multi_hot, list_separator=schema.list_separator
        )
        self.layout = Layout(columns, parquet=True)
        self._features = Features(
            label="", dense=schema.dense, one_hot=one_hot, multi_hot=multi_hot, timestamp=None,
            ids={one.name: IdsConfig() for one in schema.features}, dense_transform=schema.dense_transform,
            list_separator=schema.list_separator,
        )  # fmt: skip

    def encode(self, rows: pa.Table) -> EncodedRows:
        """Raises ValueError for a column that is missing, or of a type that cannot be what it should."""
        table = self._needed(rows)
        try:
            parsed = parse_block(self.layout, tuple(table.column_names), Block(1, 0, table.num_rows, table=table))
            dense = np.empty((len(parsed.kept), len(self.schema.dense)), np.float32)
            for place, name in enumerate(self.schema.dense):
                dense[:, place] = dense_values(parsed.table[name], self.schema.dense_transform)
            bags = self._bags(parsed.table)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise ValueError(f"the rows cannot be read: {' '.join(str(error).split())[:300]}") from None
        ids = [np.zeros(0, np.int64), *(values for values, _ in bags)]
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(lengths for _, lengths in bags)]))
        return EncodedRows(
            torch.from_numpy(dense), torch.from_numpy(np.concatenate(ids)), torch.from_numpy(ends), parsed.kept,
            parsed.quarantined,
        )  # fmt: skip

    def _needed(self, rows: pa.Table) -> pa.Table:
        """The columns of the schema, those without a single value of a type that has missing ones."""
        names, columns = rows.column_names, self.schema.columns
        if missing := [name for name in columns if name not in names]:
            listed = ", ".join(f"{name!r}{did_you_mean(name, names)}" for name in missing[:5])
            raise ValueError(f"the rows lack {len(missing)} of {len(columns)} columns: {listed}")
        if doubled := [name for name in columns if names.count(name) > 1]:
            raise ValueError(f"the rows have {names.count(doubled[0])} columns {doubled[0]!r}")
        table = rows.select(list(columns))
        for place, (name, kind) in enumerate(columns.items()):
            if wanted := _type_of_nothing(table.schema.field(name).type, kind):
                table = table.set_column(place, name, table[name].cast(wanted))
        return table.combine_chunks()

    def _bags(self, table: pa.Table) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Of each feature, the ids of all rows, one after the other, and how many each row has."""
        encoded = {name: encode_values(self._features, name, table[name]) for name in self._features.sparse}
        hashes = hashes_of([encoded[name][1] for name in self._vocabularies])
        of_distinct = {
            name: index.ids(encoded[name][1], found)
            for (name, index), found in zip(self._vocabularies.items(), hashes, strict=True)
        }
        bags = []
        for feature in self.schema.features:
            codes, distinct, lengths = encoded[feature.name]
            if feature.hash_size is not None:
                of_distinct[feature.name] = hash_ids(distinct, feature.hash_size, feature.hash_seed)
            ids = np.concatenate([np.zeros(1, np.int64), of_distinct[feature.name]])[codes]
            bags.append(_bag(feature, ids, lengths))
        return bags


def _bag(
    feature: RawFeature, ids: NDArray[np.int64], lengths: NDArray[np.integer] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(ids of all rows, how many each row has); `lengths` is None where the rows have one each."""
    if lengths is not None:
        return ids, lengths.astype(np.int64)
    if feature.bag_size == 1:
        return ids, np.ones(len(ids), np.int64)
    bags = np.empty((len(ids), feature.bag_size), np.int64)
    draw_bags(ids, feature.name, feature.cardinality, bags)
    return bags.reshape(-1), np.full(len(ids), feature.bag_size, np.int64)


def _type_of_nothing(kind: pa.DataType, column: str) -> pa.DataType | None:
    """What a column of nulls alone, as a reader of JSON makes it, is read as; None for one that has a type."""
    if pa.types.is_null(kind):
        return {DENSE: pa.float64(), SPARSE: pa.string(), MULTI_HOT: pa.list_(pa.string())}[column]
    if pa.types.is_list(kind) and pa.types.is_null(kind.value_type):
        return pa.list_(pa.string())
    return None
