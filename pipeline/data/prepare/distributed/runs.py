"""The values of one staged file as a sorted run: each value once, with its count in the file's training rows.

run.parquet       (feature, value, count), by feature and value
positions.int32   for each entry of the file, in order, the row of the run that has its value

Features that share their ids are one: the first of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.prepare.distributed.recipe import Recipe, task_engine
from pipeline.data.prepare.encode import Features
from pipeline.data.prepare.row_groups import in_row_groups
from pipeline.data.sql import sql_text
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.arrow_files import open_input

RUN_SCHEMA = pa.schema([("feature", pa.int32()), ("value", pa.string()), ("count", pa.int64())])
RUN_GROUP_ROWS = 32_768
MEMORY_A_BYTE = 6  # that sorting entries in memory takes, of their columns before compression
NUM_KEYS = 256  # of a file, from which the bounds of partitions are chosen
RUN_FILE, POSITIONS_FILE = "run.parquet", "positions.int32"
Key = tuple[int, str]  # a feature and a value, which are ordered as such; text by its UTF-8 bytes


@dataclass(frozen=True)
class Run:
    """`keys`: of NUM_KEYS rows at most, evenly spaced."""

    num_rows: int
    keys: list[Key]


@dataclass(frozen=True)
class Range:
    """Keys from `first` on and before `end`; None: without that bound."""

    first: Key | None
    end: Key | None


def owners_of(features: Features) -> list[int]:
    """[features] the number of the feature that stands for each."""
    return [features.shared_ids.get(number, [number])[0] for number in range(len(features.sparse))]


def write_run(recipe: Recipe, entries: list[str], blocks: list[int], folder: str, scratch: str) -> Run:
    """Write the files of the run to `folder`. `entries`: of the file and those that were counted again; `blocks` train.

    The entries of most files fit into a task's memory, where a hash of each feature's values and a sort of the distinct ones take a
    quarter of what DuckDB does; those of others spill.
    """
    if _uncompressed_bytes(entries) * MEMORY_A_BYTE <= recipe.resources.engine_bytes:
        return _write_in_memory(entries, blocks, recipe.features, folder)
    with task_engine(recipe, scratch) as engine:
        return _write_by_engine(engine, entries, blocks, recipe.features, folder)


def _uncompressed_bytes(entries: list[str]) -> int:
    sizes = 0
    for path in entries:
        metadata = pq.read_metadata(path)
        sizes += sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    return sizes


def _write_in_memory(entries: list[str], blocks: list[int], features: Features, folder: str) -> Run:
    columns = ["block", "feature", "value", "count"]
    table = pa.concat_tables([pq.read_table(path, columns=columns) for path in entries])
    block, values = table["block"].to_numpy(), table["value"].combine_chunks()
    owner = np.array(owners_of(features), np.int32)[table["feature"].to_numpy()]
    counts = np.where(np.isin(block, blocks), table["count"].to_numpy(), 0)
    positions = np.empty(len(table), np.int32)
    parts, num_rows = [], 0
    by_owner = np.argsort(owner, kind="stable")
    for indices in np.split(by_owner, np.flatnonzero(np.diff(owner[by_owner])) + 1):
        if not len(indices):
            continue
        encoded = values.take(pa.array(indices)).dictionary_encode()
        order = pc.sort_indices(encoded.dictionary)
        rank = np.empty(len(order), np.int32)
        rank[order.to_numpy()] = np.arange(len(order))
        own = rank[encoded.indices.to_numpy()]
        positions[indices] = num_rows + own
        sums = np.bincount(own, counts[indices], len(order)).astype(np.int64)  # exact below 2^53
        number = pa.array(np.full(len(order), owner[indices[0]], np.int32))
        parts.append(pa.table([number, encoded.dictionary.take(order), pa.array(sums)], schema=RUN_SCHEMA))
        num_rows += len(order)
    positions[block >= 0].tofile(os.path.join(folder, POSITIONS_FILE))
    run = _write_groups(parts, os.path.join(folder, RUN_FILE))
    assert run.num_rows == num_rows
    return run


def _write_by_engine(
    engine: duckdb.DuckDBPyConnection, entries: list[str], blocks: list[int], features: Features, folder: str
) -> Run:
    owners = pa.array(owners_of(features), pa.int32())
    engine.register("owners", pa.table({"feature": pa.array(range(len(owners)), pa.int32()), "owner": owners}))
    engine.register("training", pa.table({"block": pa.array(blocks, pa.int64())}))
    engine.execute("CREATE OR REPLACE TEMP TABLE train_blocks AS FROM training")
    paths = ", ".join(map(sql_text, entries))
    engine.execute(f"CREATE OR REPLACE TEMP VIEW entries AS FROM read_parquet([{paths}])")
    batches = engine.sql(
        """SELECT owner AS feature, value,
            sum(CASE WHEN train_blocks.block IS NULL THEN 0 ELSE count END)::BIGINT AS count
        FROM entries JOIN owners USING (feature) LEFT JOIN train_blocks ON entries.block = train_blocks.block
        GROUP BY owner, value ORDER BY owner, value"""
    ).to_arrow_reader(RUN_GROUP_ROWS)
    path = os.path.join(folder, RUN_FILE)
    run = _write_groups((pa.table(batch).cast(RUN_SCHEMA) for batch in batches), path)
    _write_positions(engine, path, os.path.join(folder, POSITIONS_FILE))
    return run


def _write_groups(tables: Iterable[pa.Table], path: str) -> Run:
    """The run in its order, in row groups of one size."""
    num_rows = 0
    with pq.ParquetWriter(path, RUN_SCHEMA, compression="lz4", use_dictionary=["feature"]) as writer:
        for table in in_row_groups(tables, RUN_GROUP_ROWS):
            writer.write_table(table.combine_chunks())
            num_rows += len(table)
    return Run(num_rows, _keys_of(path, num_rows))


def _write_positions(engine: duckdb.DuckDBPyConnection, run: str, path: str) -> None:
    batches = engine.sql(
        f"""SELECT file_row_number::INTEGER AS position FROM entries JOIN owners USING (feature)
        JOIN (SELECT feature AS owner, value, file_row_number FROM read_parquet({sql_text(run)}, file_row_number = true))
        USING (owner, value) WHERE entries.block >= 0 ORDER BY entry"""
    ).to_arrow_reader(65_536)
    with open(path, "wb") as raw:
        for batch in batches:
            raw.write(batch["position"].to_numpy().tobytes())


def _keys_of(path: str, num_rows: int) -> list[Key]:
    step = max(1, num_rows // NUM_KEYS)
    keys: list[Key] = []
    with pq.ParquetFile(path) as file:
        passed = 0
        for index in range(file.num_row_groups):
            table = file.read_row_group(index, columns=["feature", "value"])
            wanted = pa.array(np.arange(-passed % step, len(table), step))
            taken = table.take(wanted)
            keys += zip(taken["feature"].to_pylist(), taken["value"].to_pylist(), strict=True)
            passed += len(table)
    return keys


def _first_key(file: pq.ParquetFile, index: int) -> Key:
    table = next(file.iter_batches(1, row_groups=[index], columns=["feature", "value"]))
    return int(table["feature"][0].as_py()), str(table["value"][0].as_py())


def read_range(folder: str, keys: Range) -> tuple[int, Iterator[pa.Table]]:
    """The number of the run's first row in the range, and the rows in it."""
    stream = open_input(storage.join(folder, RUN_FILE))
    file = pq.ParquetFile(stream)
    first, end = _groups(file, keys)
    before = 0
    head: pa.Table | None = None
    if first < end and keys.first is not None:
        head = file.read_row_group(first)
        before = pc.sum(_less(head, keys.first)).as_py() or 0
    start = first * RUN_GROUP_ROWS + before

    def tables() -> Iterator[pa.Table]:
        with stream, file:
            for index in range(first, end):
                table = head.slice(before) if index == first and head is not None else file.read_row_group(index)
                if index == end - 1 and keys.end is not None:
                    table = table.slice(0, pc.sum(_less(table, keys.end)).as_py() or 0)
                if len(table):
                    yield table

    return start, tables()


def _groups(file: pq.ParquetFile, keys: Range) -> tuple[int, int]:
    """The row groups that may hold keys of the range."""
    num = file.num_row_groups
    first = 0 if keys.first is None else max(0, _num_up_to(file, keys.first) - 1)
    end = num if keys.end is None else _num_up_to(file, keys.end, below=True)
    return first, max(first, end)


def _num_up_to(file: pq.ParquetFile, key: Key, below: bool = False) -> int:
    """How many row groups begin at `key` at most, or below it."""
    low, high = 0, file.num_row_groups
    while low < high:
        middle = (low + high) // 2
        begins = _first_key(file, middle)
        if begins < key or (begins == key and not below):
            low = middle + 1
        else:
            high = middle
    return low


def _less(table: pa.Table, key: Key) -> pa.ChunkedArray:
    feature, value = key
    same = pc.and_(pc.equal(table["feature"], feature), pc.less(table["value"], value))
    return pc.or_(pc.less(table["feature"], feature), same)
