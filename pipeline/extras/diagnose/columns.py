"""Measure the columns of a data set's splits: values that tell the label, equal rows, missing and new values.

It reads row groups spread evenly over each split, up to MAX_ROWS rows of a split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.config.data import SPLITS
from pipeline.data.dataset import Dataset
from pipeline.data.quality import Floats, auc
from pipeline.data.read.row_groups import row_group_reader
from pipeline.data.read.streams import mix
from pipeline.runtime.storage import storage

MAX_ROWS = 100_000
FEW_VALUES = 20  # a dense column with at most this many values is a category
PRIOR_ROWS = 10.0  # rows at the label rate that are added to those of each value
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class SplitRows:
    """Rows of a split. labels: 0 or 1. dense and sparse: feature -> [rows]; of a list its first id."""

    num_rows: int  # of the complete split
    labels: Floats
    dense: dict[str, Floats]
    sparse: dict[str, Ids]
    hashes: NDArray[np.uint64]  # of the features of each row

    @property
    def rate(self) -> float:
        return float(self.labels.mean()) if len(self.labels) else math.nan


@dataclass(frozen=True)
class Determined:
    """A value of a feature whose rows all have the same label."""

    feature: str
    label: int
    rows: int
    num_values: int  # distinct values of the feature


def read_splits(folder: str, dataset: Dataset, label: str) -> dict[str, SplitRows]:
    """Return the splits that have rows. The label must be binary."""
    return {name: _read(folder, dataset, name, label) for name in SPLITS if dataset.splits[name].num_rows}


def _read(folder: str, dataset: Dataset, name: str, label: str) -> SplitRows:
    split = dataset.splits[name]
    keep_every = max(1, math.ceil(split.num_rows / MAX_ROWS))
    columns = [label, *dataset.dense_features, *dataset.sparse_feature_names]
    tables, number, read = [], 0, row_group_reader(folder, dataset)
    for shard in split.files:
        with storage.open_file(storage.join(folder, shard.path), "rb") as raw, pq.ParquetFile(raw) as file:
            for group in range(file.num_row_groups):
                if number % keep_every == 0:
                    tables.append(read(file, group, columns))
                number += 1
    table = pa.concat_tables(tables).slice(0, 2 * MAX_ROWS)
    dense = {each: table[each].to_numpy().astype(np.float64) for each in dataset.dense_features}
    sparse: dict[str, Ids] = {}
    hashes = np.zeros(table.num_rows, np.uint64)
    for values in dense.values():
        hashes = mix(hashes ^ values.view(np.uint64))
    for feature in dataset.sparse_features:
        column = table[feature.name].combine_chunks()
        if feature.multi_hot:
            ids, offsets = column.flatten().to_numpy().astype(np.int64), column.offsets.to_numpy()
            lengths = np.diff(offsets)
            starts = np.minimum(offsets[:-1] - offsets[0], max(len(ids) - 1, 0))
            sparse[feature.name] = np.where(lengths > 0, ids[starts] if len(ids) else 0, 0)
            sums = np.append(0, np.cumsum(ids))
            hashes = mix(hashes ^ (lengths + 31 * np.diff(sums[offsets - offsets[0]])).astype(np.uint64))
        else:
            sparse[feature.name] = column.to_numpy().astype(np.int64)
        first: NDArray[np.uint64] = sparse[feature.name].astype(np.uint64)
        hashes = mix(np.bitwise_xor(hashes, first))
    return SplitRows(split.num_rows, (table[label].to_numpy() != 0).astype(np.float64), dense, sparse, hashes)


def alone_auc(train: SplitRows, other: SplitRows, feature: str) -> float:
    """Return the AUC on `other` of the label rates that each value of one feature has in `train`.

    Numbers with many values rank by themselves, in either direction.
    """
    if feature in train.sparse:
        mine, theirs = train.sparse[feature], other.sparse[feature]
    else:
        values = np.unique(train.dense[feature])
        if len(values) > FEW_VALUES:
            sign = 1 if auc(train.dense[feature], train.labels) >= 0.5 else -1
            return auc(sign * other.dense[feature], other.labels)
        mine, theirs = (np.searchsorted(values, each.dense[feature]) for each in (train, other))
    size = int(max(mine.max(), theirs.max())) + 1
    counts = np.bincount(mine, minlength=size)
    rates = (np.bincount(mine, train.labels, size) + PRIOR_ROWS * train.rate) / (counts + PRIOR_ROWS)
    return auc(rates[theirs], other.labels)


def auc_error(labels: Floats) -> float:
    """Return the standard error of the AUC of scores that say nothing (Mann and Whitney 1947)."""
    positives = float(labels.sum())
    negatives = len(labels) - positives
    return math.sqrt((positives + negatives + 1) / (12 * positives * negatives)) if positives and negatives else 1.0


def determined_values(rows: SplitRows, least_share: float, least_expected: float) -> list[Determined]:
    """Return the values in at least `least_share` of the rows that all have one label, where at least
    `least_expected` rows of the other label were expected."""
    found = []
    for feature in (*rows.dense, *rows.sparse):
        values = rows.sparse.get(feature)
        if values is None:
            _, values = np.unique(rows.dense[feature], return_inverse=True)
        counts = np.bincount(values)
        positives = np.bincount(values, rows.labels)
        for label, expected in ((1, counts * (1 - rows.rate)), (0, counts * rows.rate)):
            same = positives == counts * label
            for value in np.flatnonzero(
                same & (counts >= least_share * len(rows.labels)) & (expected >= least_expected)
            ):
                found.append(Determined(feature, label, int(counts[value]), int(np.count_nonzero(counts))))
    return found


def repeated_over(train: SplitRows, other: SplitRows) -> tuple[int, float]:
    """Return how many rows of `other` equal a row of `train` in all features, and the share of their
    positives whose twins are positive."""
    hashes, index, counts = np.unique(train.hashes, return_inverse=True, return_counts=True)
    rates = np.bincount(index, train.labels) / counts
    at = np.minimum(np.searchsorted(hashes, other.hashes), len(hashes) - 1)
    shared = hashes[at] == other.hashes
    positives = shared & (other.labels == 1)
    return int(shared.sum()), float(rates[at][positives].mean()) if positives.any() else 0.0


def repeated_within(rows: SplitRows) -> tuple[int, float]:
    """Return how many rows equal an earlier one in all features, and how often the twins of a positive
    are positive."""
    _, index, counts = np.unique(rows.hashes, return_inverse=True, return_counts=True)
    positives = np.bincount(index, rows.labels)
    pairs = float((positives * (counts - 1)).sum())
    return len(rows.hashes) - len(counts), float((positives * (positives - 1)).sum()) / pairs if pairs else 0.0


def empty_share(rows: SplitRows, feature: str) -> float:
    """Return the share of rows without a known value: id 0, or the same number in all rows."""
    if feature in rows.sparse:
        return float((rows.sparse[feature] == 0).mean())
    values = rows.dense[feature]
    return 1.0 if len(values) and values.min() == values.max() else 0.0
