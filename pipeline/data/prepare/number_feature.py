"""Count the values of one feature over all files, give them ids, and write the id of each value.

If the values fit the memory of the task, pyarrow numbers them. Otherwise DuckDB counts, sorts and
joins within its memory limit and spills beyond it, so the number of distinct values has no bound.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.data import IdsConfig
from pipeline.data.dataset import FrequencyCurve
from pipeline.data.prepare.base_vocabulary import DESCENDING_COUNT
from pipeline.data.prepare.divide import COUNTS_FILE, load_blocks
from pipeline.data.prepare.recipe import Json, Recipe, finished, once, scratch_folder, task_engine
from pipeline.data.prepare.vocabulary import RankedFeature, limit_memory, rank_values
from pipeline.data.sql import parquet, sql_text
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.arrow_files import open_input

VOCABULARY_FILE, IDS_FILE = "vocabulary.parquet", "ids.int32"
BATCH_ROWS = 65_536
MEMORY_PER_BYTE = 6  # bytes of memory per byte of values when numbering in memory
VALUES_JOINED_AND_SORTED = 1 << 24  # values of a vocabulary that one statement joins and sorts
# share of the memory for larger vocabularies: DuckDB 2.0 exceeds its limit by half there (measured
# at 50M)
LARGE_SHARE = 0.7
SEEN_SCHEMA = pa.schema([("value", pa.string()), ("count", pa.int32())])
ENTRIES_SCHEMA = pa.schema([("position", pa.int64()), ("value", pa.string())])


@dataclass(frozen=True)
class FeatureToNumber:
    """`files`: the folders of each staged and divided file; `num_lookups`: lookups in training rows
    by all features that share the ids. `in_memory`: the task may not use DuckDB, only its share
    of memory.
    """

    number: int
    files: list[tuple[str, str]]
    num_lookups: int
    in_memory: bool = True


@dataclass(frozen=True)
class NumberedFeature:
    """`folder` holds IDS_FILE (the ids of all values in source order, int32), and VOCABULARY_FILE
    unless ids are hashed.

    value_buckets: see BaseVocabulary.count_buckets.
    """

    ranked: RankedFeature
    folder: str
    value_buckets: list[int] = field(default_factory=list)


def number_feature(recipe: Recipe, item: FeatureToNumber) -> NumberedFeature | None:
    """Task: give ids to the values of a feature. Return None if only memory may be used, and the values do not fit."""
    features = recipe.features
    ids = features.ids[features.sparse[item.number]]
    folder = recipe.path(f"ids-{recipe.key}-{item.number:05d}")
    held = None
    if item.in_memory and finished(folder) is None:
        held = _read_all(recipe, item) if recipe.base is None else None
        if held is None:
            return None

    def write(attempt: str) -> Json:
        vocabulary = None if ids.kind == "hash" else os.path.join(attempt, VOCABULARY_FILE)
        path = os.path.join(attempt, IDS_FILE)
        if held is not None:
            return asdict(_number_in_memory(held, ids, item.num_lookups, vocabulary, path))
        return _number_by_engine(recipe, item, ids, vocabulary, path)

    result: Any = dict(once(recipe, folder, write))
    value_buckets = result.pop("value_buckets", [])
    curve = FrequencyCurve(**result.pop("frequency_curve"))
    return NumberedFeature(RankedFeature(**result, frequency_curve=curve), folder, value_buckets)


def _number_by_engine(recipe: Recipe, item: FeatureToNumber, ids: IdsConfig, vocabulary: str | None, path: str) -> Json:
    base, name = recipe.base, recipe.features.sparse[item.number]
    with scratch_folder(recipe) as scratch, task_engine(recipe, scratch) as engine:
        _count(engine, recipe, item, os.path.join(scratch, "counted.parquet"))
        num_lookups, order, buckets = item.num_lookups, DESCENDING_COUNT, []
        if base is not None:
            buckets = base.count_buckets(engine)
            if vocabulary is not None:
                ids, order = base.settings(name, ids), base.order(name)
                num_lookups += base.num_lookups(name)
        in_order = _copy(engine, order, os.path.join(scratch, "in_order.parquet"))
        batches = ((batch["value"], batch["count"].to_numpy()) for batch in _batches(in_order))
        ranked = rank_values(batches, ids, num_lookups, vocabulary)
        entries = _values(recipe, item.number, item.files)
        found: Iterator[np.ndarray]
        if vocabulary is None:
            found = (values.cast(pa.int32()).to_numpy() for values, _ in entries)
        else:
            found = _find_ids(engine, entries, vocabulary, scratch, recipe.resources.engine_bytes)
        with open(path, "wb") as raw:
            for numbers in found:
                raw.write(numbers.astype(np.int32, copy=False).tobytes())
    return asdict(ranked) | {"value_buckets": buckets}


def _values(recipe: Recipe, feature: int, files: list[tuple[str, str]]) -> Iterator[tuple[pa.Array, np.ndarray]]:
    """Yield the values of each block in source order, with their numbers of occurrences in the
    block's training rows.
    """
    num_features = len(recipe.features.sparse)
    for folder, path in files:
        blocks = load_blocks(folder, path)
        if not blocks:
            continue
        with (
            open_input(blocks[0].file.values_path) as staged,
            open_input(storage.join(path, COUNTS_FILE)) as counted,
        ):
            values, recounted = pa.ipc.open_file(staged), pa.ipc.open_file(counted)
            num_shared = 0
            for block in blocks:
                batch = values.get_batch(block.index * num_features + feature)
                counts = batch["count"].to_numpy()
                if block.is_shared:
                    counts = recounted.get_batch(num_shared * num_features + feature)["count"].to_numpy()
                    num_shared += 1
                elif not block.per_split[0]:
                    counts = np.zeros_like(counts)
                yield batch["value"], counts


def _group(recipe: Recipe, number: int) -> list[int]:
    """Return the features that share their ids with a feature. The feature itself comes first."""
    members = recipe.features.shared_ids.get(number, [number])
    return [number, *(other for other in members if other != number)]


@dataclass(frozen=True)
class _Held:
    """The values of a feature, then of the features that share its ids. The first `num_own` are its values."""

    values: pa.Array
    counts: np.ndarray
    num_own: int


def _read_all(recipe: Recipe, item: FeatureToNumber) -> _Held | None:
    """Read all values.

    Return None if numbering the values needs more than a thread's share of the memory.
    """
    limit = recipe.resources.engine_bytes // recipe.resources.threads
    values, counts = [pa.array([], pa.string())], [np.zeros(0, np.int32)]
    num_bytes = num_own = 0
    for number in _group(recipe, item.number):
        for block_values, block_counts in _values(recipe, number, item.files):
            num_bytes += block_values.nbytes + block_counts.nbytes
            if num_bytes * MEMORY_PER_BYTE > limit:
                return None
            values.append(block_values)
            counts.append(block_counts)
            num_own += len(block_values) if number == item.number else 0
    return _Held(pa.concat_arrays(values), np.concatenate(counts), num_own)


def _number_in_memory(
    held: _Held, ids: IdsConfig, num_lookups: int, vocabulary: str | None, path: str
) -> RankedFeature:
    """Number the values as DuckDB does, in a quarter of the time."""
    # A file without any value of the column has one null, which no row uses.
    encoded = held.values.fill_null("").dictionary_encode()
    distinct, codes = encoded.dictionary, encoded.indices.to_numpy()
    sums = np.bincount(codes, held.counts, len(distinct)).astype(np.int64)  # exact below 2^53
    table = pa.table({"value": distinct, "count": sums})
    order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")]).to_numpy()
    order = order[: np.count_nonzero(sums)]
    ranked = rank_values([(distinct.take(pa.array(order)), sums[order])], ids, num_lookups, vocabulary)
    if vocabulary is None:
        id_of_code = distinct.cast(pa.int32()).to_numpy()
    else:
        id_of_code = np.zeros(len(distinct), np.int32)
        num_kept = ranked.cardinality - 1
        id_of_code[order[:num_kept]] = np.arange(1, num_kept + 1)
    id_of_code[codes[: held.num_own]].astype(np.int32, copy=False).tofile(path)
    return ranked


def _count(engine: duckdb.DuckDBPyConnection, recipe: Recipe, item: FeatureToNumber, path: str) -> None:
    """Create `counted` (value, count) over the training rows of all features that share the ids."""

    def batches() -> Iterator[pa.RecordBatch]:
        for number in _group(recipe, item.number):
            for values, counts in _values(recipe, number, item.files):
                yield pa.record_batch([values, pa.array(counts)], schema=SEEN_SCHEMA)

    engine.register("seen", pa.RecordBatchReader.from_batches(SEEN_SCHEMA, batches()))
    _copy(engine, "SELECT value, sum(count)::BIGINT AS count FROM seen WHERE count > 0 GROUP BY value", path)
    engine.execute(f"CREATE TEMP VIEW counted AS SELECT value, count FROM {parquet(path)}")


def _copy(engine: duckdb.DuckDBPyConnection, query: str, path: str) -> str:
    """Write the result of a query to a file. DuckDB would use more memory if it streamed a sorted result."""
    engine.execute(f"COPY ({query}) TO {sql_text(path)} (FORMAT parquet, COMPRESSION lz4_raw)")
    return path


def _batches(path: str) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(BATCH_ROWS)


def _find_ids(
    engine: duckdb.DuckDBPyConnection,
    entries: Iterator[tuple[pa.Array, np.ndarray]],
    vocabulary: str,
    scratch: str,
    memory_bytes: int,
) -> Iterator[np.ndarray]:
    """Yield the ids of all entries in their order; 0 for values without an id."""

    def batches() -> Iterator[pa.RecordBatch]:
        position = 0
        for values, _ in entries:
            positions = pa.array(np.arange(position, position + len(values)))
            yield pa.record_batch([positions, values], schema=ENTRIES_SCHEMA)
            position += len(values)

    engine.register("entries", pa.RecordBatchReader.from_batches(ENTRIES_SCHEMA, batches()))
    ids = f"""SELECT position, coalesce(id, 0) AS id FROM entries
        LEFT JOIN {parquet(vocabulary)} USING (value)"""
    if pq.read_metadata(vocabulary).num_rows > VALUES_JOINED_AND_SORTED:
        # A join and a sort that both spill do not share the memory limit: with 50M values DuckDB 2.0 ran out of it.
        limit_memory(engine, int(memory_bytes * LARGE_SHARE))
        unsorted = _copy(engine, ids, os.path.join(scratch, "unsorted.parquet"))
        limit_memory(engine, memory_bytes)
        ids = f"SELECT * FROM {parquet(unsorted)}"
    path = _copy(engine, f"SELECT id FROM ({ids}) ORDER BY position", os.path.join(scratch, "ids.parquet"))
    for batch in _batches(path):
        yield batch["id"].to_numpy()
