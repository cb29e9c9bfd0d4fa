"""Assign ids to categorical values: by descending frequency in the training rows, or by a seeded hash.

See number_feature.py for the counting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.data import IdsConfig
from pipeline.data.dataset import FrequencyCurve
from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.sql import sql_text

VOCABULARY_SCHEMA = pa.schema([("value", pa.string()), ("count", pa.int64()), ("id", pa.int32())])
# fixed, so that the file has the same bytes for any batches of values
VOCABULARY_GROUP_ROWS = 65_536
# 1, 2, 3, 5, 7, 10, ... 10^10: even in the logarithm, larger than any table.
CURVE_RANKS = np.unique(np.round(10.0 ** (np.arange(61) / 6)).astype(np.int64))


@dataclass(frozen=True)
class RankedFeature:
    cardinality: int
    num_distinct: int
    frequency_curve: FrequencyCurve


def open_engine(folder: str, memory_bytes: int, threads: int) -> duckdb.DuckDBPyConnection:
    """Return a DuckDB in memory that spills into `folder`."""
    engine = duckdb.connect(config={"threads": threads})
    limit_memory(engine, memory_bytes)
    engine.execute(f"SET temp_directory = {sql_text(folder)}")
    # queries ask for every order that they need
    engine.execute("SET preserve_insertion_order = false")
    return engine


def limit_memory(engine: duckdb.DuckDBPyConnection, memory_bytes: int) -> None:
    engine.execute(f"SET memory_limit = '{memory_bytes >> 20}MiB'")


def rank_values(
    batches: Iterable[tuple[pa.Array, np.ndarray]], ids: IdsConfig, num_lookups: int, path: str | None
) -> RankedFeature:
    """Number one feature's values from 1 on and write its vocabulary to `path`, which is None if
    ids are hashed.

    Values seen fewer than ids.min_frequency times, or beyond ids.max_size rows (including row 0),
    get no id.
    """
    curve = _CurveBuilder()
    num_kept = num_distinct = 0
    limit = ids.max_size - 1 if ids.max_size and path else np.iinfo(np.int32).max

    def kept_rows() -> Iterator[pa.Table]:
        nonlocal num_kept, num_distinct
        for values, counts in batches:
            num_distinct += len(counts)
            kept = len(counts) if not path else int(np.count_nonzero(counts >= ids.min_frequency))
            kept = min(kept, limit - num_kept)
            curve.add(counts[:kept])
            numbers = pa.array(np.arange(num_kept + 1, num_kept + kept + 1, dtype=np.int32))
            num_kept += kept
            if path:
                yield pa.table([values.slice(0, kept), pa.array(counts[:kept]), numbers], schema=VOCABULARY_SCHEMA)

    if path:
        with pq.ParquetWriter(path, VOCABULARY_SCHEMA) as writer:
            for table in in_row_groups(kept_rows(), VOCABULARY_GROUP_ROWS):
                writer.write_table(table.combine_chunks())
    else:
        deque(kept_rows(), maxlen=0)
    cardinality = num_kept + 1 if path else int(ids.hash_size or 0)
    return RankedFeature(cardinality, num_distinct if path else 0, curve.finish(cardinality, num_lookups))


class _CurveBuilder:
    """Sums the counts of the most frequent ids. Counts are added in batches, in descending order."""

    def __init__(self) -> None:
        self._upto = np.zeros(len(CURVE_RANKS), dtype=np.int64)  # of the first CURVE_RANKS[i] values
        self._before = np.zeros(len(CURVE_RANKS), dtype=np.int64)  # of one value less
        self._seen = self._sum = 0

    def add(self, counts: np.ndarray) -> None:
        sums = self._sum + np.concatenate([[0], np.cumsum(counts)])
        for target, ranks in ((self._upto, CURVE_RANKS), (self._before, CURVE_RANKS - 1)):
            reached = ranks >= self._seen
            target[reached] = sums[np.minimum(ranks[reached] - self._seen, len(counts))]
        self._seen += len(counts)
        self._sum = int(sums[-1])

    def finish(self, cardinality: int, num_lookups: int) -> FrequencyCurve:
        """Return the curve.

        Id 0 gets the lookups of all values without an id, and its rank depends on the number of
        these lookups.
        """
        unknown = num_lookups - self._sum
        top = np.maximum(self._upto, self._before + unknown)
        inside = cardinality > CURVE_RANKS
        ranks = [*CURVE_RANKS[inside].tolist(), cardinality]
        shares = [*(top[inside] / max(num_lookups, 1)).tolist(), 1.0]
        return FrequencyCurve(ranks, [round(share, 9) for share in shares])


def vocabulary_file(feature: str) -> str:
    return f"vocabulary/{quote(feature, safe='')}.parquet"
