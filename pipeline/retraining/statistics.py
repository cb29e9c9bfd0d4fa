"""Summarize a window as a few statistics that later windows are compared with.

They come from the rows as prepared with the champion's vocabularies, and from the raw rows for
statistics that do not depend on vocabularies.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.data.dataset import Dataset
from pipeline.data.prepare.base_vocabulary import BUCKETS_FILE
from pipeline.data.read.row_groups import row_group_reader
from pipeline.runtime.storage import storage

NUM_QUANTILES = 64
MAX_QUANTILE_ROWS = 200_000  # of a dense feature, taken evenly from all row groups


@dataclass(frozen=True)
class WindowStatistics:
    """Statistics of a window. Label rate, shares and quantiles are weighted by the sample weights.

    empty_share: feature -> share of rows whose ids are all unknown to the champion (dense: whose
    value is 0). distance: feature -> distance of its values from the previous accepted window, from
    0 (equal) to 1 (nothing in common), by the `quantiles` of dense features and the hash `buckets`
    of other features. It does not depend on vocabularies. sketch: the smallest hashes of the
    window's rows (row_sketch.py). age: windows between the champion's and this window. begin: of
    the window, ISO 8601. apart: by how many windows it comes after the previous accepted one; 1 is
    the next.
    """

    rows: int
    label_rate: float
    empty_share: dict[str, float] = field(default_factory=dict)
    distance: dict[str, float] = field(default_factory=dict)
    quantiles: dict[str, list[float]] = field(default_factory=dict)
    buckets: dict[str, list[int]] = field(default_factory=dict)
    age: int = 0
    begin: str = ""
    apart: int = 1
    sketch: str = ""
    repeated_share: float = 0.0
    repeated_of: str = ""  # the earlier window that shares most rows
    champion_ne: float | None = None
    champion_calibration: float | None = None
    outside_share: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> WindowStatistics:
        return cls(**values)


def measure(folder: str, dataset: Dataset, previous: WindowStatistics | None) -> WindowStatistics:
    """Measure the features of `dataset` in the training split in `folder`. previous: the previous
    accepted window.
    """
    reader, read = _Counts(dataset), row_group_reader(folder, dataset)
    for shard in dataset.splits["train"].files:
        with storage.open_file(storage.join(folder, shard.path), "rb") as raw, pq.ParquetFile(raw) as file:
            for group in range(file.num_row_groups):
                reader.add(read(file, group))
    empty, distance, quantiles = {}, {}, {}
    for name in dataset.dense_features:
        values = np.concatenate(reader.dense[name]) if reader.dense[name] else np.zeros(0, np.float32)
        empty[name] = reader.empty[name] / (reader.weight or 1.0)
        weights = None if reader.weights is None else np.concatenate([*reader.weights, np.zeros(0)])
        quantiles[name] = [float(f"{value:.6g}") for value in _quantiles(values, weights)]
        if previous is not None and name in previous.quantiles:
            distance[name] = ks_distance(previous.quantiles[name], quantiles[name])
    buckets = _buckets(folder)
    for name in dataset.sparse_feature_names:
        empty[name] = reader.empty[name] / (reader.weight or 1.0)
        if previous is not None and name in previous.buckets and name in buckets:
            distance[name] = total_variation(previous.buckets[name], buckets[name])
    rate = dataset.splits["train"].label_rate
    return WindowStatistics(reader.rows, rate, _rounded(empty), _rounded(distance), quantiles, buckets)


def _rounded(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(share, 5) for name, share in shares.items()}


def _buckets(folder: str) -> dict[str, list[int]]:
    path = storage.join(folder, BUCKETS_FILE)
    return json.loads(storage.read_text(path)) if storage.is_file(path) else {}


class _Counts:
    """Sums over row groups."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        num_groups = sum(len(shard.row_groups) for shard in dataset.splits["train"].files)
        self._rows_a_group = max(1, MAX_QUANTILE_ROWS // max(num_groups, 1))
        self.rows, self.weight = 0, 0.0
        # of the rows in `dense`; None: all 1
        self.weights: list[NDArray[np.float64]] | None = [] if dataset.weight_column else None
        names = [*dataset.dense_features, *dataset.sparse_feature_names]
        self.empty = dict.fromkeys(names, 0.0)
        self.dense: dict[str, list[NDArray[np.float32]]] = {name: [] for name in dataset.dense_features}

    def add(self, table: Any) -> None:
        step = max(1, table.num_rows // self._rows_a_group)
        weights = np.ones(table.num_rows)
        if self.weights is not None:
            weights = table[self._dataset.weight_column].to_numpy().astype(np.float64)
            self.weights.append(weights[::step])
        self.rows, self.weight = self.rows + table.num_rows, self.weight + float(weights.sum())
        for name in self._dataset.dense_features:
            values = table[name].to_numpy()
            self.empty[name] += float(weights[values == 0].sum())
            self.dense[name].append(values[::step])
        for feature in self._dataset.sparse_features:
            column = table[feature.name].combine_chunks()
            ids = column.flatten().to_numpy() if feature.multi_hot else column.to_numpy()
            known = ids > 0
            if feature.multi_hot:
                known = np.logical_or.reduceat(np.append(known, False), column.offsets.to_numpy()[:-1])
                known &= np.diff(column.offsets.to_numpy()) > 0
            self.empty[feature.name] += float(weights[~known].sum())


def _quantiles(values: NDArray[np.float32], weights: NDArray[np.float64] | None) -> NDArray[np.float32]:
    if not len(values) or (weights is not None and not weights.any()):
        return np.zeros(NUM_QUANTILES, np.float32)
    return np.quantile(values, np.linspace(0, 1, NUM_QUANTILES), method="inverted_cdf", weights=weights)


def ks_distance(before: list[float], now: list[float]) -> float:
    """Return the Kolmogorov-Smirnov distance: the largest difference of two distribution functions
    given by quantiles.
    """
    first, second = np.asarray(before), np.asarray(now)
    points = np.union1d(first, second)
    below = [np.searchsorted(each, points, side="right") / len(each) for each in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


def total_variation(before: list[int], now: list[int]) -> float:
    """Return half the sum of the differences of two distributions over the same buckets."""
    if not sum(before) or not sum(now):
        return 0.0 if sum(before) == sum(now) else 1.0
    shares = [np.asarray(counts, np.float64) / sum(counts) for counts in (before, now)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)
