"""Divide the rows of a staged file among the splits, and count the values of its training rows."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.prepare.buckets import count_numbers
from pipeline.data.prepare.recipe import Json, Recipe, finished, once, scratch_folder, task_engine
from pipeline.data.prepare.splits import (
    TIMES_SCHEMA,
    BlockRows,
    Boundaries,
    blocks_of_file,
    count_training,
    times_of,
)
from pipeline.data.prepare.staging import load_staged
from pipeline.data.prepare.standardize import Moments, moments_of, names_to_learn
from pipeline.runtime.storage import storage

COUNTS_FILE = "counts.arrow"  # see splits.count_training


@dataclass(frozen=True)
class FileToDivide:
    """A staged file to divide among the splits. `first_row`: the number of rows in the files before it."""

    folder: str
    boundaries: Boundaries
    first_row: int


@dataclass(frozen=True)
class DividedFile:
    """A divided file.

    `folder`: the folder of the staged file; `path`: the output of this task. num_values,
    num_lookups: [num_features].
    """

    folder: str
    path: str
    per_split: list[int]
    num_values: list[int]
    num_lookups: list[int]
    moments: dict[str, Moments]


def count_times(recipe: Recipe, folder: str) -> str:
    """Task: count the rows of a staged file by their time. Write (time, rows) and return the path."""
    path = f"{folder}-times"

    def write(attempt: str) -> Json:
        with scratch_folder(recipe) as scratch, task_engine(recipe, scratch) as engine:
            batches = times_of(load_staged(folder))
            engine.register("times", pa.RecordBatchReader.from_batches(TIMES_SCHEMA, batches))
            query = "SELECT time, count(*) AS rows FROM times GROUP BY time ORDER BY time"
            _write_table(engine.sql(query).to_arrow_reader(65_536), os.path.join(attempt, "times.parquet"))
        return {}

    once(recipe, path, write)
    return storage.join(path, "times.parquet")


def divide_file(recipe: Recipe, item: FileToDivide) -> DividedFile:
    """Task: find the split of each row. Count the values and the numbers of the training rows."""
    path = f"{item.folder}-divided-{recipe.key}"
    features, boundaries = recipe.features, item.boundaries

    def write(attempt: str) -> Json:
        staged = load_staged(item.folder)
        blocks = blocks_of_file(staged, boundaries, item.first_row)
        lookups = count_training(blocks, boundaries, features, os.path.join(attempt, COUNTS_FILE))
        if features.buckets:
            _write_numbers(recipe, blocks, boundaries, attempt)
        moments = {name: asdict(moments_of(name, blocks, boundaries)) for name in names_to_learn(features)}
        return {
            "first_row": item.first_row,
            "blocks": [list(block.per_split) for block in blocks],
            "num_values": _sums(staged.num_values, len(features.sparse)),
            "num_lookups": lookups.tolist(),
            "moments": moments,
        }

    found: Any = once(recipe, path, write)
    return DividedFile(
        folder=item.folder,
        path=path,
        per_split=_sums(found["blocks"], 3),
        num_values=found["num_values"],
        num_lookups=found["num_lookups"],
        moments={name: Moments(**each) for name, each in found["moments"].items()},
    )


def _sums(rows: list[list[int]], width: int) -> list[int]:
    sums: list[int] = np.array(rows, np.int64).reshape(len(rows), width).sum(axis=0).tolist()
    return sums


def _write_numbers(recipe: Recipe, blocks: list[BlockRows], boundaries: Boundaries, folder: str) -> None:
    """Write the training values of each column that gets buckets, with their counts, sorted by value."""
    with scratch_folder(recipe) as scratch, task_engine(recipe, scratch) as engine:
        for number, name in enumerate(recipe.features.buckets):
            count_numbers(engine, name, blocks, boundaries)
            counted = engine.sql("SELECT value, count FROM counted ORDER BY value").to_arrow_reader(65_536)
            _write_table(counted, os.path.join(folder, numbers_file(number)))


def numbers_file(number: int) -> str:
    """Return the name of the file with a column's training values, for a column that gets buckets."""
    return f"numbers-{number}.parquet"


@lru_cache(maxsize=64)
def load_blocks(folder: str, path: str) -> list[BlockRows]:
    """Return the blocks of a staged file. `path` is the output of divide_file for this file."""
    staged, found = load_staged(folder), finished(path)
    assert found is not None, path
    divided: Any = found
    blocks = []
    first_row = divided["first_row"]
    for index, per_split in enumerate(divided["blocks"]):
        num_rows = staged.block_rows[index]
        blocks.append(BlockRows(staged, index, first_row, num_rows, tuple(per_split)))
        first_row += num_rows
    return blocks


def _write_table(batches: pa.RecordBatchReader, path: str) -> None:
    with pq.ParquetWriter(path, batches.schema, compression="lz4") as writer:
        for batch in batches:
            writer.write_batch(batch)
