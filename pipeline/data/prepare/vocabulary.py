"""Assign ids to categorical values: by descending frequency in the training rows, or by a seeded hash.

Blocks hold codes into their own distinct values ("entries"), so entries, not rows, are counted, sorted and joined.
DuckDB does that within its memory limit and spills to disk beyond it, so the number of distinct values has no bound.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from urllib.parse import quote

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.ids import IdsConfig
from pipeline.data.dataset import FrequencyCurve
from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.sql import sql_text
from pipeline.runtime.logs import progress

ENTRIES_SCHEMA = pa.schema(
    [
        ("entry", pa.int64()),  # ascending over all entries of all files
        ("block", pa.int64()),  # ascending likewise
        ("feature", pa.int32()),
        ("value", pa.string()),  # of a hashed feature: the id in decimal
        ("count", pa.int64()),
    ]
)
VOCABULARY_SCHEMA = pa.schema([("value", pa.string()), ("count", pa.int64()), ("id", pa.int32())])
VOCABULARY_GROUP_ROWS = 65_536  # whatever the batches that values come in: the same bytes from every engine
VALUES_JOINED_AND_SORTED = 1 << 24  # of vocabularies, by one statement
LARGE_SHARE = 0.7  # of the memory, for more of them: DuckDB 2.0 goes half over its limit there (measured at 50M)
# 1, 2, 3, 5, 7, 10, ... 10^10: evenly spaced in logarithm, past any table's end.
CURVE_RANKS = np.unique(np.round(10.0 ** (np.arange(61) / 6)).astype(np.int64))


@dataclass(frozen=True)
class RankedFeature:
    cardinality: int
    num_distinct: int
    frequency_curve: FrequencyCurve


def open_engine(folder: str, memory_bytes: int, threads: int) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory that spills into `folder`."""
    engine = duckdb.connect(config={"threads": threads})
    _limit(engine, memory_bytes)
    engine.execute(f"SET temp_directory = {sql_text(folder)}")
    engine.execute("SET preserve_insertion_order = false")  # every order that matters is asked for
    engine.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
    return engine


def _limit(engine: duckdb.DuckDBPyConnection, memory_bytes: int) -> None:
    engine.execute(f"SET memory_limit = '{memory_bytes >> 20}MiB'")


def _run(engine: duckdb.DuckDBPyConnection, description: str, statement: str) -> None:
    """Execute with our progress bar."""
    shown = 0.0
    with ThreadPoolExecutor(1) as pool, progress(description, 100) as bar:
        running = pool.submit(engine.execute, statement)
        try:
            while not running.done():
                wait([running], timeout=0.2)
                share = max(shown, engine.query_progress())  # -1 before the first estimate
                bar.advance(share - shown)
                shown = share
        except BaseException:
            engine.interrupt()
            raise
        running.result()


def count_values(
    engine: duckdb.DuckDBPyConnection,
    entries: list[str],
    train_blocks: list[int],
    output: str,
    shared: Mapping[int, list[int]] | None = None,
) -> None:
    """Write (feature, value, count) over `train_blocks`, by feature, then descending count, ties by value.

    shared: feature -> all that share its ids; a value counts for each of them as often as it stands in all of them.
    """
    engine.register("blocks", pa.table({"block": pa.array(train_blocks, pa.int64())}))
    engine.execute("CREATE OR REPLACE TEMP TABLE train_blocks AS FROM blocks")  # a scan of Arrow shows no progress
    counted = f"SELECT feature, value, count FROM {_parquet(entries)} SEMI JOIN train_blocks USING (block)"
    if shared:
        others = [(number, other) for number, group in shared.items() for other in group if other != number]
        counted += "".join(
            f" UNION ALL SELECT {number}::INTEGER AS feature, value, count FROM {_parquet(entries)} "
            f"SEMI JOIN train_blocks USING (block) WHERE feature = {other}"
            for number, other in others
        )
    _run(
        engine,
        "counting values",
        f"""COPY (
            SELECT feature, value, sum(count)::BIGINT AS count FROM ({counted})
            GROUP BY feature, value ORDER BY feature, count DESC, value
        ) TO {sql_text(output)} (FORMAT parquet, COMPRESSION lz4_raw)""",
    )


def read_counts(path: str) -> Iterator[tuple[int, Iterator[tuple[pa.Array, np.ndarray]]]]:
    """(feature, batches of its values and their counts), in the order of the file that count_values wrote."""

    def pieces() -> Iterator[tuple[int, tuple[pa.Array, np.ndarray]]]:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                features, counts = batch["feature"].to_numpy(), batch["count"].to_numpy()
                cuts = [0, *(np.flatnonzero(np.diff(features)) + 1), len(features)]
                for begin, end in pairwise(cuts):
                    yield int(features[begin]), (batch["value"].slice(begin, end - begin), counts[begin:end])

    for feature, group in groupby(pieces(), key=itemgetter(0)):
        yield feature, (piece for _, piece in group)


def rank_values(
    batches: Iterable[tuple[pa.Array, np.ndarray]], ids: IdsConfig, num_lookups: int, path: str | None
) -> RankedFeature:
    """Number one feature's values from 1 and write its vocabulary to `path`; None where ids are hashed.

    Values seen fewer than ids.min_frequency times, or beyond ids.max_size rows (row 0 included), get no id of their own.
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
    """Sums over the most frequent ids, from descending counts that come in batches."""

    def __init__(self) -> None:
        self._upto = np.zeros(len(CURVE_RANKS), dtype=np.int64)  # of the first CURVE_RANKS[i] values
        self._before = np.zeros(len(CURVE_RANKS), dtype=np.int64)  # of one value fewer
        self._seen = self._sum = 0

    def add(self, counts: np.ndarray) -> None:
        sums = self._sum + np.concatenate([[0], np.cumsum(counts)])
        for target, ranks in ((self._upto, CURVE_RANKS), (self._before, CURVE_RANKS - 1)):
            reached = ranks >= self._seen
            target[reached] = sums[np.minimum(ranks[reached] - self._seen, len(counts))]
        self._seen += len(counts)
        self._sum = int(sums[-1])

    def finish(self, cardinality: int, num_lookups: int) -> FrequencyCurve:
        """Id 0 takes what the values did not, and its rank among them: the top r hold it where that is more."""
        unknown = num_lookups - self._sum
        top = np.maximum(self._upto, self._before + unknown)
        inside = cardinality > CURVE_RANKS
        ranks = [*CURVE_RANKS[inside].tolist(), cardinality]
        shares = [*(top[inside] / max(num_lookups, 1)).tolist(), 1.0]
        return FrequencyCurve(ranks, [round(share, 9) for share in shares])


def map_entries(
    engine: duckdb.DuckDBPyConnection,
    entries: list[str],
    vocabularies: dict[int, str],
    hashed: list[int],
    outputs: list[tuple[str, int]],
    table: str,
    memory_bytes: int,
) -> None:
    """Write the id of every entry, raw int32, in the order of entries; 0 for values without an id.

    outputs: a path for each file of entries, and how many it has. `table` is the path of a temporary file, `memory_bytes` the engine's.
    """
    nothing = f"SELECT feature, value, 0 AS id FROM {_parquet(entries)} LIMIT 0"
    known = " UNION ALL ".join(
        f"SELECT {feature} AS feature, value, id FROM {_parquet([path])}" for feature, path in vocabularies.items()
    )
    is_hashed = f"feature IN ({', '.join(map(str, hashed))})" if hashed else "false"
    joined = f"""
        SELECT entry, CASE WHEN {is_hashed} THEN value::INTEGER ELSE coalesce(id, 0) END AS id
        FROM {_parquet(entries)} LEFT JOIN ({known or nothing}) USING (feature, value)"""
    ids, unsorted = f"({joined})", f"{table}.unsorted"
    if is_large := sum(pq.read_metadata(path).num_rows for path in vocabularies.values()) > VALUES_JOINED_AND_SORTED:
        # A join and a sort that both spill do not share the memory limit: of 50M values DuckDB 2.0 ran out of it.
        _limit(engine, int(memory_bytes * LARGE_SHARE))
        _run(engine, "finding ids", f"COPY ({joined}) TO {sql_text(unsorted)} (FORMAT parquet, COMPRESSION lz4_raw)")
        ids = _parquet([unsorted])
    _run(
        engine,
        "giving ids",
        f"COPY (SELECT id FROM {ids} ORDER BY entry) TO {sql_text(table)} (FORMAT parquet, COMPRESSION lz4_raw)",
    )
    if is_large:
        _limit(engine, memory_bytes)
        os.remove(unsorted)
    with pq.ParquetFile(table) as file:
        write_in_parts((batch["id"].to_numpy() for batch in file.iter_batches()), outputs)
    os.remove(table)


def write_in_parts(numbers: Iterator[np.ndarray], outputs: list[tuple[str, int]]) -> None:
    """Write int32 numbers, the first `count` of them to the first path, and so on."""
    waiting = np.zeros(0, np.int32)
    for path, count in outputs:
        with open(path, "wb") as raw:
            while count:
                if not len(waiting):
                    waiting = next(numbers).astype(np.int32, copy=False)
                raw.write(waiting[:count].tobytes())
                taken = min(count, len(waiting))
                waiting, count = waiting[taken:], count - taken
    assert not len(waiting) and next(numbers, None) is None


def vocabulary_file(feature: str) -> str:
    return f"vocabulary/{quote(feature, safe='')}.parquet"


def _parquet(paths: list[str]) -> str:
    return f"read_parquet([{', '.join(sql_text(path) for path in paths)}])"
