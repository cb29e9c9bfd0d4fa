"""Count values and give them ids, a partition of the values at a time.

A partition holds all keys (feature, value) of a range. Ids go by descending count, ties by value, which is an order of all
values; so nothing is sorted as a whole: within one count the values of lower partitions come first, and how many values
each partition has of a count says from which id on its own are numbered. Where the ranges are cut leaves no trace.

counted-<p>    values.parquet (feature, value, count), by feature, descending count, value; histogram.parquet (feature,
               count, rows) in the same order
numbered-<p>   ids.parquet (feature, value, id), values without an id left out; answers.int32: the ids of the runs of all
               files in turn, a row of the range each
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.prepare.distributed.recipe import Json, Recipe, fetch, finished, once, scratch_folder, task_engine
from pipeline.data.prepare.distributed.runs import POSITIONS_FILE, RUN_SCHEMA, Key, Range, read_range
from pipeline.data.prepare.encode import Features
from pipeline.data.prepare.staging import IDS_FILE
from pipeline.data.sql import sql_text
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.arrow_files import read_numbers

VALUES_FILE, HISTOGRAM_FILE, IDS_TABLE, ANSWERS_FILE = (
    "values.parquet",
    "histogram.parquet",
    "ids.parquet",
    "answers.int32",
)
HISTOGRAM_SCHEMA = pa.schema([("feature", pa.int32()), ("count", pa.int64()), ("rows", pa.int64())])
BATCH_ROWS = 65_536


@dataclass(frozen=True)
class Partition:
    """`files`: where the runs of all files lie."""

    number: int
    of: int
    keys: Range
    files: list[str]

    def path(self, recipe: Recipe, kind: str) -> str:
        return recipe.path(f"{kind}-{recipe.key}-{self.number:05d}-of-{self.of:05d}")


@dataclass(frozen=True)
class Numbering:
    """`bases`: a file of (feature, count, rows, base) of the partition, as its histogram; a value's id is base + 1 and on."""

    partition: Partition
    bases: str


@dataclass(frozen=True)
class FileToMap:
    """`path`: where the file was divided; `numbered`: the folders of all partitions."""

    index: int
    path: str
    numbered: list[str]


def cut_ranges(keys: Sequence[tuple[Key, float]], num_partitions: int) -> list[Range]:
    """Ranges that hold about as many rows each; a key stands for its number of rows."""
    ordered = sorted(keys)
    upto = np.cumsum([rows for _, rows in ordered])
    bounds: list[Key] = []
    for share in range(1, num_partitions):
        index = int(np.searchsorted(upto, upto[-1] * share / num_partitions)) if len(ordered) else 0
        if index < len(ordered) and ordered[index][0] > (bounds[-1] if bounds else ordered[0][0]):
            bounds.append(ordered[index][0])
    edges = [None, *bounds, None]
    return [Range(first, end) for first, end in pairwise(edges)]


def count_partition(recipe: Recipe, partition: Partition) -> str:
    """The path of the partition's histogram."""
    path = partition.path(recipe, "counted")

    def write(attempt: str) -> Json:
        values = os.path.join(attempt, VALUES_FILE)
        with scratch_folder(recipe) as scratch, task_engine(recipe, scratch) as engine:
            batches = _without_files(partition)
            engine.register("runs", pa.RecordBatchReader.from_batches(RUN_SCHEMA, batches))
            counted = engine.sql(
                """SELECT feature, value, sum(count)::BIGINT AS count FROM runs GROUP BY feature, value
                HAVING sum(count) > 0 ORDER BY feature, count DESC, value"""
            ).to_arrow_reader(BATCH_ROWS)
            num_rows = _write_counted(counted, values, os.path.join(attempt, HISTOGRAM_FILE))
        return {"num_rows": num_rows}

    once(recipe, path, write)
    return storage.join(path, HISTOGRAM_FILE)


def _without_files(partition: Partition) -> Iterator[pa.RecordBatch]:
    for file in partition.files:
        for table in read_range(file, partition.keys)[1]:
            yield from table.to_batches()


def _write_counted(batches: Iterator[pa.RecordBatch], values: str, histogram: str) -> int:
    """Both files of a partition in one pass over its values, which come in their order."""
    num_rows = 0
    held: tuple[int, int, int] | None = None  # the last group, which the next batch may go on with
    with (
        pq.ParquetWriter(values, RUN_SCHEMA, compression="lz4", use_dictionary=["feature"]) as writer,
        pq.ParquetWriter(histogram, HISTOGRAM_SCHEMA, compression="lz4") as groups,
    ):
        for batch in batches:
            if not len(batch):
                continue
            writer.write_batch(batch.cast(RUN_SCHEMA))
            num_rows += len(batch)
            features, counts = batch["feature"].to_numpy(), batch["count"].to_numpy()
            starts = np.flatnonzero(np.concatenate([[True], (np.diff(features) != 0) | (np.diff(counts) != 0)]))
            rows = np.diff(np.append(starts, len(counts)))
            features, counts = features[starts], counts[starts]
            if held is not None and (held[0], held[1]) == (features[0], counts[0]):
                rows[0] += held[2]
            elif held is not None:
                groups.write_table(_groups(*([each] for each in held)))
            groups.write_table(_groups(features[:-1], counts[:-1], rows[:-1]))
            held = int(features[-1]), int(counts[-1]), int(rows[-1])
        if held is not None:
            groups.write_table(_groups(*([each] for each in held)))
    return num_rows


def _groups(*columns: Sequence[int] | np.ndarray) -> pa.Table:
    return pa.table([pa.array(column) for column in columns], names=HISTOGRAM_SCHEMA.names).cast(HISTOGRAM_SCHEMA)


def write_bases(recipe: Recipe, histograms: list[str]) -> str:
    """A file of (partition, feature, count, rows, base): how many values of the feature come before those of that count in
    that partition."""
    path = recipe.path(f"bases-{recipe.key}-of-{len(histograms):05d}")

    def write(attempt: str) -> Json:
        with scratch_folder(recipe) as scratch, task_engine(recipe, scratch) as engine:
            parts = " UNION ALL ".join(
                f"SELECT {number} AS partition, feature, count, rows FROM read_parquet({sql_text(fetch(each, scratch))})"
                for number, each in enumerate(histograms)
            )
            engine.execute(
                f"""COPY (SELECT partition, feature, count, rows, (sum(rows) OVER (
                    PARTITION BY feature ORDER BY count DESC, partition ROWS UNBOUNDED PRECEDING
                ) - rows)::BIGINT AS base FROM ({parts}) ORDER BY partition, feature, count DESC)
                TO {sql_text(os.path.join(attempt, "bases.parquet"))} (FORMAT parquet, COMPRESSION lz4_raw)"""
            )
        return {}

    once(recipe, path, write)
    return storage.join(path, "bases.parquet")


def number_partition(recipe: Recipe, item: Numbering) -> str:
    """The folder of the partition's ids."""
    partition = item.partition
    path = partition.path(recipe, "numbered")

    def write(attempt: str) -> Json:
        counted = storage.join(partition.path(recipe, "counted"), VALUES_FILE)
        ids_path = os.path.join(attempt, IDS_TABLE)
        with scratch_folder(recipe) as scratch, task_engine(recipe, scratch) as engine:
            bases = engine.sql(
                f"""SELECT rows, base FROM read_parquet({sql_text(fetch(item.bases, scratch))}) WHERE partition = {partition.number}
                ORDER BY feature, count DESC"""
            ).to_arrow_table()
            _write_ids(fetch(counted, scratch), bases, recipe.features, ids_path)
            hashed = [n for n, name in enumerate(recipe.features.sparse) if recipe.features.ids[name].kind == "hash"]
            rows_of_files: list[int] = []
            schema = pa.schema([("file", pa.int32()), ("position", pa.int64()), *RUN_SCHEMA])
            ranges = _with_files(partition, schema, rows_of_files)
            engine.register("runs", pa.RecordBatchReader.from_batches(schema, ranges))
            is_hashed = f"feature IN ({', '.join(map(str, hashed))})" if hashed else "false"
            answers = engine.sql(
                f"""SELECT CASE WHEN {is_hashed} THEN value::INTEGER ELSE coalesce(id, 0) END AS id
                FROM runs LEFT JOIN read_parquet({sql_text(ids_path)}) USING (feature, value) ORDER BY file, position"""
            ).to_arrow_reader(BATCH_ROWS)
            with open(os.path.join(attempt, ANSWERS_FILE), "wb") as raw:
                for batch in answers:
                    raw.write(batch["id"].to_numpy().astype(np.int32).tobytes())
        return {"rows_of_files": rows_of_files}

    once(recipe, path, write)
    return path


def _with_files(partition: Partition, schema: pa.Schema, rows_of_files: list[int]) -> Iterator[pa.RecordBatch]:
    """The rows of the range of every run; how many of each file comes into `rows_of_files`."""
    for number, folder in enumerate(partition.files):
        start, tables = read_range(folder, partition.keys)
        rows_of_files.append(0)
        for table in tables:
            positions = np.arange(start, start + len(table))
            columns = [pa.array(np.full(len(table), number, np.int32)), pa.array(positions)]
            yield from pa.table([*columns, *table.columns], schema=schema).combine_chunks().to_batches()
            start += len(table)
            rows_of_files[-1] += len(table)


def _write_ids(counted: str, bases: pa.Table, features: Features, path: str) -> None:
    """Of values that are frequent enough, and within the sizes of their tables. `bases` has a row for each group of equal
    feature and count, in the order of `counted`."""
    rows, base = bases["rows"].to_numpy(), bases["base"].to_numpy()
    starts = np.cumsum(rows) - rows
    kinds = [features.ids[name] for name in features.sparse]
    least = np.array([0 if ids.kind == "hash" else ids.min_frequency for ids in kinds], np.int64)
    largest = np.iinfo(np.int32).max
    most = np.array([ids.max_size - 1 if ids.max_size and ids.kind != "hash" else largest for ids in kinds], np.int64)
    schema = pa.schema([("feature", pa.int32()), ("value", pa.string()), ("id", pa.int32())])
    passed = 0
    with pq.ParquetFile(counted) as file, pq.ParquetWriter(path, schema, compression="lz4") as writer:
        for batch in file.iter_batches(BATCH_ROWS):
            numbers = np.arange(passed, passed + len(batch))
            group = np.searchsorted(starts, numbers, side="right") - 1
            ids = base[group] + numbers - starts[group] + 1
            owners, counts = batch["feature"].to_numpy(), batch["count"].to_numpy()
            kept = (counts >= least[owners]) & (ids <= most[owners])
            table = pa.table(
                [batch["feature"], batch["value"], pa.array(np.where(kept, ids, 0).astype(np.int32))], schema=schema
            )
            writer.write_table(table.filter(pa.array(kept)))
            passed += len(batch)
    assert passed == rows.sum()


def map_file(recipe: Recipe, item: FileToMap) -> None:
    """Write the id behind each entry of a file: by its position in the run, whose ids the partitions have found."""
    path = storage.join(item.path, "ids")

    def write(attempt: str) -> Json:
        parts = []
        for folder in item.numbered:
            found = finished(folder)
            assert found is not None, folder
            rows = cast(list[int], found["rows_of_files"])
            parts.append(read_numbers(storage.join(folder, ANSWERS_FILE), sum(rows[: item.index]), rows[item.index]))
        ids = np.concatenate([np.zeros(0, np.int32), *parts])
        divided = finished(item.path)
        assert divided is not None and len(ids) == divided["num_run_rows"]
        with (
            storage.open_file(storage.join(item.path, POSITIONS_FILE), "rb") as positions,
            open(os.path.join(attempt, IDS_FILE), "wb") as raw,
        ):
            while chunk := positions.read(4 * BATCH_ROWS):
                raw.write(ids[np.frombuffer(chunk, np.int32)].tobytes())
        return {}

    once(recipe, path, write)
