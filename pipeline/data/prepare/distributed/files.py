"""The tasks of one source file: stage its rows, count its times, divide its rows among the splits, encode its ids."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.prepare.buckets import count_numbers
from pipeline.data.prepare.distributed.recipe import Json, Recipe, fetch, finished, once, scratch_folder, task_engine
from pipeline.data.prepare.distributed.runs import write_run
from pipeline.data.prepare.limit import refuse_hopeless
from pipeline.data.prepare.splits import (
    TIMES_SCHEMA,
    BlockRows,
    Boundaries,
    blocks_of_file,
    count_training,
    times_of,
)
from pipeline.data.prepare.staging import StagedFile, stage_into, staged_folder
from pipeline.data.prepare.standardize import Moments, moments_of, names_to_learn
from pipeline.data.raw.source import Source
from pipeline.runtime.storage import storage


@dataclass(frozen=True)
class FileSummary:
    """What the driver keeps of a staged file, however long it is."""

    folder: str
    number: int
    num_rows: int
    num_source_rows: int
    num_quarantined: int
    first_quarantined: str
    num_negative: dict[str, int]
    num_times: dict[str, int]


@dataclass(frozen=True)
class FileToDivide:
    """`first_row`: how many rows the files before it have."""

    folder: str
    boundaries: Boundaries
    first_row: int


@dataclass(frozen=True)
class DividedFile:
    """`folder` is that of the staged file, `path` this task's own, below it. run_keys: see runs.write_run."""

    folder: str
    path: str
    per_split: list[int]
    num_lookups: list[int]
    moments: dict[str, Moments]
    num_run_rows: int
    run_keys: list[tuple[int, str]]


def stage_file(recipe: Recipe, source_of_number: tuple[int, Source]) -> FileSummary:
    """A task: read one source file into a staged folder, and count what it holds. Doing it again finds the folder there.

    Raises:
        DataError: so many of its rows cannot be read that the preparation could only end with an error.
    """
    number, source = source_of_number
    resources = recipe.resources
    folder = staged_folder(resources.staging, source, number, recipe.layout, recipe.features) + "-shared"

    def check(staged: StagedFile, position: int) -> None:
        refuse_hopeless(recipe.config, source, staged)

    def write(attempt: str) -> Json:
        staged = stage_into(
            attempt, source, number, recipe.layout, recipe.features,
            block_bytes=resources.block_bytes, threads=resources.threads, advance=lambda _: None, check=check,
        )  # fmt: skip
        return asdict(replace(staged, folder=folder))

    once(recipe, folder, write)
    staged = load_staged(folder)
    return FileSummary(
        folder, number, staged.num_rows, staged.num_source_rows, staged.num_quarantined, staged.first_quarantined,
        staged.num_negative, staged.num_times,
    )  # fmt: skip


def load_staged(folder: str) -> StagedFile:
    found = finished(folder)
    assert found is not None, folder
    return StagedFile(**cast(dict[str, int], found) | {"folder": folder})  # type: ignore[arg-type]


def count_times(recipe: Recipe, folder: str) -> str:
    """The path of (time, rows) of a staged file."""
    path = storage.join(folder, "times")

    def write(attempt: str) -> Json:
        with scratch_folder(recipe) as scratch, task_engine(recipe, scratch) as engine:
            batches = times_of([load_staged(folder)])
            engine.register("times", pa.RecordBatchReader.from_batches(TIMES_SCHEMA, batches))
            query = "SELECT time, count(*) AS rows FROM times GROUP BY time ORDER BY time"
            write_table(engine.sql(query).to_arrow_reader(65_536), os.path.join(attempt, "times.parquet"))
        return {}

    once(recipe, path, write)
    return storage.join(path, "times.parquet")


def divide_file(recipe: Recipe, item: FileToDivide) -> DividedFile:
    """Which rows train, what their values are, sorted, and what is to be learnt from them."""
    path = storage.join(item.folder, f"divided-{recipe.key}")
    features = recipe.features

    def write(attempt: str) -> Json:
        staged = load_staged(item.folder)
        blocks = blocks_of_file(staged, item.boundaries, item.first_row)
        with scratch_folder(recipe) as scratch:
            recounted = os.path.join(scratch, "recounted.parquet")
            training = count_training(blocks, item.boundaries, features, recounted)
            entries = fetch(staged.entries_path, scratch) if blocks else None
            paths = [recounted] if entries is None else [entries, recounted]
            run = write_run(recipe, paths, training.blocks, attempt, scratch)
            if features.buckets:
                _write_numbers(recipe, blocks, item.boundaries, attempt, scratch)
        return {
            "first_row": item.first_row,
            "blocks": [list(block.per_split) for block in blocks],
            "num_lookups": training.num_lookups.tolist(),
            "moments": {name: asdict(moments_of(name, blocks, item.boundaries)) for name in names_to_learn(features)},
            "num_run_rows": run.num_rows,
            "run_keys": run.keys,
        }

    found = once(recipe, path, write)
    moments = cast(dict[str, dict[str, float]], found["moments"])
    return DividedFile(
        folder=item.folder,
        path=path,
        per_split=np.sum(np.array([[0, 0, 0], *cast(list[list[int]], found["blocks"])]), axis=0).tolist(),
        num_lookups=cast(list[int], found["num_lookups"]),
        moments={name: Moments(**each) for name, each in moments.items()},  # type: ignore[arg-type]
        num_run_rows=cast(int, found["num_run_rows"]),
        run_keys=[(int(feature), str(value)) for feature, value in cast(list[tuple[int, str]], found["run_keys"])],
    )


def _write_numbers(recipe: Recipe, blocks: list[BlockRows], boundaries: Boundaries, folder: str, scratch: str) -> None:
    """For each column that is to be in buckets its training values and their counts, by value."""
    with task_engine(recipe, scratch) as engine:
        for number, name in enumerate(recipe.features.buckets):
            count_numbers(engine, name, blocks, boundaries)
            counted = engine.sql("SELECT value, count FROM counted ORDER BY value").to_arrow_reader(65_536)
            write_table(counted, os.path.join(folder, numbers_file(number)))


def load_blocks(folder: str, path: str) -> list[BlockRows]:
    """Of a file that was divided at `path`."""
    staged, found = load_staged(folder), finished(path)
    assert found is not None, path
    staged.ids_folder = storage.join(path, "ids")
    blocks = []
    first_row, first_entry = cast(int, found["first_row"]), 0
    for index, per_split in enumerate(cast(list[list[int]], found["blocks"])):
        num_rows = staged.block_rows[index]
        blocks.append(BlockRows(staged, index, first_row, num_rows, first_entry, tuple(per_split)))
        first_row += num_rows
        first_entry += sum(staged.num_values[index])
    return blocks


def numbers_file(number: int) -> str:
    """Of the training values of a column that is to be in buckets."""
    return f"numbers-{number}.parquet"


def write_table(batches: pa.RecordBatchReader, path: str) -> None:
    with pq.ParquetWriter(path, batches.schema, compression="lz4") as writer:
        for batch in batches:
            writer.write_batch(batch)
