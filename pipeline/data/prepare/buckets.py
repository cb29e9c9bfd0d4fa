"""Learn the buckets of numeric columns from the training rows, and number them by frequency.

DuckDB counts and sorts the distinct values, so boundaries are exact, and memory stays within
DuckDB's limit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.config.data import BucketsConfig, IdsConfig
from pipeline.data.dataset import SparseFeature
from pipeline.data.prepare.base_vocabulary import BaseVocabulary
from pipeline.data.prepare.encode import Features
from pipeline.data.prepare.splits import BlockRows, Boundaries, read_block, split_of_block
from pipeline.data.prepare.vocabulary import rank_values, vocabulary_file
from pipeline.data.raw.dense_transforms import bucket_numbers
from pipeline.runtime.errors import DataError

BucketIds = NDArray[np.int32]  # see ids_of_buckets
# values ascending, and the number of training rows with each
Counted = tuple[NDArray[np.float64], NDArray[np.int64]]


def count_numbers(
    engine: duckdb.DuckDBPyConnection, name: str, blocks: list[BlockRows], boundaries: Boundaries
) -> None:
    """Create the table `counted` (value, count) of a column's training rows. -0.0 counts as 0.0."""
    schema = pa.schema([("value", pa.float64())])
    batches = _training_values(name, blocks, boundaries, schema)
    engine.register("numbers", pa.RecordBatchReader.from_batches(schema, batches))
    engine.execute(
        "CREATE OR REPLACE TEMP TABLE counted AS SELECT value + 0.0 AS value, count(*) AS count FROM numbers GROUP BY 1"
    )


def learn_from_counts(
    engine: duckdb.DuckDBPyConnection, features: Features, name: str, staging: str, base: BaseVocabulary | None
) -> SparseFeature:
    """Learn from the table `counted` of the column; write the vocabulary below `staging`.

    A column of the base data set keeps its boundaries, and also its ids if `base` is frozen.
    """
    found = _boundaries_in(base, name)
    if found is None:
        found = boundaries_of(features.buckets[name], lambda: _read(engine))
    counts = np.zeros(len(found) + 1, np.int64)
    num_missing = engine.sql("SELECT coalesce(sum(count), 0)::BIGINT FROM counted WHERE isnan(value)").fetchall()[0][0]
    num_distinct = 0
    for values, rows in _read(engine):
        counts += np.bincount(bucket_numbers(values, found), weights=rows, minlength=len(counts)).astype(np.int64)
        num_distinct += len(values)
    order, counts = _ranked(counts, base, name)
    vocabulary = vocabulary_file(name)
    path = os.path.join(staging, vocabulary)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    texts = pa.array([str(number) for number in order], pa.string())
    ranked = rank_values([(texts, counts)], IdsConfig(), int(counts.sum() + num_missing), path)
    return SparseFeature(
        name=name,
        cardinality=ranked.cardinality,
        multi_hot=False,
        mean_pooling_factor=1.0,
        frequency_curve=ranked.frequency_curve,
        vocabulary=vocabulary,
        num_distinct=num_distinct,
        boundaries=found,
    )


def boundaries_of(config: BucketsConfig, counted: Callable[[], Iterator[Counted]]) -> list[float]:
    """Return the first value of each bucket except the lowest, ascending.

    `counted` yields the training values with their counts in batches.
    """
    if config.boundaries is not None:
        return list(config.boundaries)
    if config.kind == "log2":
        return _log2_boundaries(counted())
    total = sum(int(rows.sum()) for _, rows in counted())
    return _quantiles(counted(), total, config.num_buckets)


def _quantiles(counted: Iterator[Counted], total: int, num_buckets: int) -> list[float]:
    targets = np.arange(1, num_buckets) * total / num_buckets
    found: list[float] = []
    passed, is_full = 0, False  # whether the next value begins a bucket
    for values, rows in counted:
        if is_full:
            found.append(float(values[0]))
        upto = passed + np.cumsum(rows)
        full = np.unique(np.searchsorted(upto, targets[(targets > passed) & (targets <= upto[-1])]))
        found += values[full[full + 1 < len(values)] + 1].tolist()
        is_full = bool(len(full)) and int(full[-1]) == len(values) - 1
        passed = int(upto[-1])
    return found


def _log2_boundaries(counted: Iterator[Counted]) -> list[float]:
    least, greatest = math.inf, -math.inf
    for values, _ in counted:
        least, greatest = min(least, float(values[0])), max(greatest, float(values[-1]))
    if least > greatest:
        return []  # only missing values
    whole = range(math.floor(max(least, -1000.0)) + 1, 3) if least < 2 else range(0)
    top = math.floor(math.log(greatest) ** 2) if greatest > 2 else 0
    return [float(number) for number in whole] + [math.exp(math.sqrt(number)) for number in range(1, top + 1)]


def _training_values(
    name: str, blocks: list[BlockRows], boundaries: Boundaries, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    columns = [name, *boundaries.columns]
    for block in blocks:
        if block.per_split[0]:
            batch = read_block(block.file, block.index, columns)
            trains = pa.array(split_of_block(block, boundaries, batch) == 0)
            yield pa.record_batch([batch[name].filter(trains)], schema=schema)


def _read(engine: duckdb.DuckDBPyConnection) -> Iterator[Counted]:
    """Yield values and counts without missing values."""
    query = "SELECT value, count FROM counted WHERE NOT isnan(value) ORDER BY value"
    for batch in engine.sql(query).to_arrow_reader(65_536):
        if len(batch):
            yield batch["value"].to_numpy(), batch["count"].to_numpy()


def _boundaries_in(base: BaseVocabulary | None, name: str) -> list[float] | None:
    """Return the column's boundaries in the base data set; None if the column is new. Raises
    DataError if the base has a vocabulary of the column's values instead of buckets.
    """
    known = {feature.name: feature for feature in base.dataset.sparse_features} if base is not None else {}
    if base is None or name not in known:
        return None
    if known[name].boundaries is None:
        raise DataError(
            f"vocabularies.path: data set {base.dataset.name!r} has no buckets of {name!r}; prepare both with the same "
            "data.buckets"
        )
    return known[name].boundaries


def _ranked(
    counts: NDArray[np.int64], base: BaseVocabulary | None, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the buckets in the order of their ids, and their counts. The order is by frequency, or
    as in a frozen base.
    """
    if base is not None and name in base.files:
        table = pq.read_table(base.files[name], columns=["value", "count"])
        known = np.array([int(value) for value in table["value"].to_pylist()], np.int64)
        if base.frozen:
            return known, table["count"].to_numpy()
        counts = counts.copy()
        counts[known] += np.floor(table["count"].to_numpy() * base.count_decay).astype(np.int64)
    order = np.argsort(-counts, kind="stable")
    return order, counts[order]


def ids_of_buckets(feature: SparseFeature, staging: str) -> BucketIds:
    """Return [buckets + 1]: entry b is the id of bucket b. The last entry is for the missing value
    and is 0.
    """
    table = pq.read_table(os.path.join(staging, feature.vocabulary or ""), columns=["value", "id"])
    ids = np.zeros(len(feature.boundaries or []) + 2, np.int32)
    ids[[int(value) for value in table["value"].to_pylist()]] = table["id"].to_numpy()
    return ids
