"""Divide staged rows into train, validation and test at two boundaries.

Every row has a key: its number in source order, its time, or a hash. Rows below the first boundary
are for training, rows from the second boundary on for test, the rest for validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import duckdb
import numpy as np
import pyarrow as pa

from pipeline.config.columns import NegativeSamplingConfig
from pipeline.config.data import SPLITS, SplitConfig
from pipeline.data.dataset import GROUP_COLUMN
from pipeline.data.prepare.encode import TIMESTAMP_COLUMN, Features
from pipeline.data.prepare.staging import LZ4, StagedFile
from pipeline.data.raw.parse_cells import parse_timestamps
from pipeline.data.read.streams import mix
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import arrow_files

DROPPED = len(SPLITS)  # a number that is no split, for negatives that sampling leaves out
COUNTS_SCHEMA = pa.schema([("count", pa.int32())])


@dataclass(frozen=True)
class Boundaries:
    """The two boundaries of keys. `by` says what a row's key is: its number (row), its time, or a
    seeded hash (random: of the number, user: of the group). `sampling` leaves out some training
    rows.
    """

    first_validation: int
    first_test: int
    by: str = "row"
    seed: int = 0
    sampling: NegativeSamplingConfig | None = None

    @property
    def column(self) -> str | None:
        """Return the staged column that holds the keys; None if the keys are the numbers of the rows."""
        return {"time": TIMESTAMP_COLUMN, "user": GROUP_COLUMN}.get(self.by)

    @property
    def columns(self) -> list[str]:
        """Return the staged columns that the splits of rows depend on; [] if the numbers of rows
        are enough.
        """
        keys = [] if self.column is None else [self.column]
        return [*keys, *([self.sampling.label] if self.sampling else [])]

    def keys(self, first_row: int, num_rows: int, staged: np.ndarray | None) -> np.ndarray:
        """Return keys [rows] int64. `staged` is the block's column that holds the keys, if there is one."""
        keys = np.arange(first_row, first_row + num_rows) if staged is None else staged
        if self.by not in ("random", "user"):
            return keys
        seeded = keys.astype(np.int64).view(np.uint64) ^ mix(np.array([self.seed], np.uint64))
        return (mix(seeded) >> np.uint64(1)).view(np.int64)

    def split_of(self, keys: np.ndarray) -> np.ndarray:
        """Return [rows]: the split of each row as an index into SPLITS."""
        return (keys >= self.first_validation).astype(np.int8) + (keys >= self.first_test)


@dataclass(frozen=True)
class BlockRows:
    """The position of a staged block among all rows, and the number of its rows in each split."""

    file: StagedFile
    index: int
    first_row: int
    num_rows: int
    per_split: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        """Return True if some of its rows, but not all, are training rows."""
        return 0 < self.per_split[0] < self.num_rows


class RowCount(Protocol):
    @property
    def num_rows(self) -> int: ...


def find_boundaries(
    config: SplitConfig,
    files: Sequence[RowCount],
    find_times: Callable[[list[int]], list[int]],
    given: Sequence[str | None] = (),
) -> Boundaries:
    """Find the boundaries.

    `find_times` takes row numbers in the order of time, and returns the times of these rows.
    """
    total = sum(file.num_rows for file in files)
    if config.kind == "given":
        return _between_files(files, given)
    if config.kind in ("date", "random", "user"):
        return _by_key(config)
    if config.kind == "files":
        if len(files) < 2:
            raise DataError(
                "data.split.kind=files holds out the last of several files, and source names 1; use row_range"
            )
        last = files[-1].num_rows
        first, second = total - last, total - last // 2
    else:
        first, second = _cuts(total, config)
    if config.kind == "time":
        first, second = find_times([first, second])
    return Boundaries(first, second, by="time" if config.kind == "time" else "row")


def _by_key(config: SplitConfig) -> Boundaries:
    """Return the boundaries if data.split.kind makes them depend only on the config."""
    if config.kind == "date":
        first = _time("split.validation_from", config.validation_from or "")
        second = np.iinfo(np.int64).max if config.test_from is None else _time("split.test_from", config.test_from)
        if second <= first:
            raise DataError(
                f"data.split.validation_from={config.validation_from} must be before data.split.test_from={config.test_from}"
            )
        return Boundaries(first, int(second), by="time")
    first, second = _cuts(2**62, config)
    return Boundaries(2 * first, 2 * second, by=config.kind, seed=config.seed)


def _time(key: str, text: str) -> int:
    try:
        return int(parse_timestamps(pa.array([text]))[0].as_py())
    except (pa.ArrowInvalid, TypeError):
        raise DataError(
            f"data.{key}={text!r} is no time: give a whole number, or 2026-11-22 or 2026-11-22T10:00:00"
        ) from None


def _between_files(files: Sequence[RowCount], given: Sequence[str | None]) -> Boundaries:
    rows = {name: [file.num_rows for file, split in zip(files, given, strict=True) if split == name] for name in SPLITS}
    for name, held in rows.items():
        if held and not sum(held):
            raise DataError(
                f"none of the rows of data.split.{name} ({len(held)} files) was accepted: name others, or leave it out"
            )
    first_validation = sum(rows["train"])
    return Boundaries(first_validation, first_validation + sum(rows["validation"]))


def _cuts(total: int, config: SplitConfig) -> tuple[int, int]:
    """Return the row numbers where validation and test begin.

    An odd row goes to validation. 1e-9 is added because 2/14 * 14 = 1.9999.
    """
    held_out = config.validation_fraction + config.test_fraction
    num_held_out = math.floor(total * held_out + 1e-9)
    num_test = math.floor(num_held_out * config.test_fraction / held_out + 1e-9) if held_out else 0
    return total - num_held_out, total - num_test


TIMES_SCHEMA = pa.schema([("time", pa.int64())])


def times_of(file: StagedFile) -> Iterator[pa.RecordBatch]:
    for i in range(len(file.block_rows)):
        yield pa.record_batch([read_block(file, i, [TIMESTAMP_COLUMN])[0]], schema=TIMES_SCHEMA)


def times_at(counted: duckdb.DuckDBPyRelation, rows: list[int]) -> list[int]:
    """Return the times of the rows with these numbers in the order of time; a number past the end
    gets a later time.

    `counted` has (time, rows), sorted by time.
    """
    found: list[int] = []
    passed, latest = 0, 0
    for batch in counted.to_arrow_reader(65_536):
        times, upto = batch["time"].to_numpy(), passed + np.cumsum(batch["rows"].to_numpy())
        while len(found) < len(rows) and rows[len(found)] < upto[-1]:
            found.append(int(times[np.searchsorted(upto, rows[len(found)], side="right")]))
        passed, latest = int(upto[-1]), int(times[-1])
    return found + [latest + 1] * (len(rows) - len(found))


def read_block(file: StagedFile, index: int, columns: list[str] | None = None) -> pa.RecordBatch:
    """Read a batch of staged rows, all columns or some.

    The file is read, not mapped, because mapped pages count as memory.
    """
    with arrow_files.open_input(file.rows_path) as stream:
        schema = pa.ipc.open_file(stream).schema
        included = None if columns is None else [schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=included, use_threads=False)
        return pa.ipc.open_file(stream, options=options).get_batch(index)


def split_of_block(block: BlockRows, boundaries: Boundaries, batch: pa.RecordBatch) -> np.ndarray:
    """Return [rows]: the split of each row as an index into SPLITS, or DROPPED. `batch` has the
    block's columns boundaries.columns.
    """
    return _split_of_rows(block.first_row, block.num_rows, boundaries, batch)


def _split_of_rows(first_row: int, num_rows: int, boundaries: Boundaries, batch: pa.RecordBatch | None) -> np.ndarray:
    """Return the splits of rows. `batch` may be None if no column decides."""
    staged = None if batch is None or boundaries.column is None else batch[boundaries.column].to_numpy()
    splits = boundaries.split_of(boundaries.keys(first_row, num_rows, staged))
    if batch is not None and (sampling := boundaries.sampling) is not None:
        numbers = np.arange(first_row, first_row + num_rows).astype(np.uint64)
        shares = mix(mix(np.array([sampling.seed], np.uint64)) ^ numbers) / 2.0**64
        negative = batch[sampling.label].to_numpy() == 0
        splits[(splits == 0) & negative & (shares >= sampling.keep)] = DROPPED
    return splits


def blocks_of_file(file: StagedFile, boundaries: Boundaries, first_row: int) -> list[BlockRows]:
    """Return the blocks of a file. `first_row` is the number of rows in the files before it."""
    blocks = []
    columns = boundaries.columns
    edges = np.array([0, boundaries.first_validation, boundaries.first_test, np.iinfo(np.int64).max])
    for i, num_rows in enumerate(file.block_rows):
        if boundaries.by != "row" or columns:
            batch = read_block(file, i, columns) if columns else None
            splits = _split_of_rows(first_row, num_rows, boundaries, batch)
            per_split = np.bincount(splits, minlength=DROPPED + 1)[:DROPPED]
        else:
            per_split = np.diff(np.clip(edges, first_row, first_row + num_rows))
        blocks.append(BlockRows(file, i, first_row, num_rows, tuple(per_split.tolist())))
        first_row += num_rows
    return blocks


def check_dates(config: SplitConfig, num_rows: int, num_held_out: int) -> None:
    """Raise DataError if no row is as late as `validation_from`: a date is later than any time in
    seconds, so the units probably differ.
    """
    if config.kind == "date" and not num_held_out:
        raise DataError(
            f"none of {num_rows:,} rows is from data.split.validation_from={config.validation_from} on. Where the timestamp column has "
            "whole numbers, such as seconds since 1970, give validation_from and test_from as such; else give an earlier time"
        )


def check_rows_to_train_on(found: bool, num_rows: int) -> None:
    """Raise DataError if `found`, the number of training rows, is 0."""
    if not num_rows:
        raise DataError(
            "no row was accepted, all are in the quarantine: correct data.format and data.columns, or the source"
        )
    if not found:
        raise DataError(
            f"none of {num_rows} accepted rows is left to train on: lower data.split.validation_fraction and "
            "test_fraction, or bring more rows"
        )


def count_training(blocks: list[BlockRows], boundaries: Boundaries, features: Features, path: str) -> np.ndarray:
    """Return [num_features]: the number of lookups in the training rows of one file.

    In a block with only training rows, the counts of values were staged. In a block that several
    splits share, values are counted again and written to `path`: a record batch for each such block
    and feature.
    """
    lookups = np.zeros(len(features.sparse), dtype=np.int64)
    with pa.ipc.new_file(path, COUNTS_SCHEMA, options=LZ4) as writer:
        for block in blocks:
            if block.is_shared:
                lookups += _recount(block, boundaries, features, writer)
            elif block.per_split[0]:
                lookups += np.array(block.file.num_lookups[block.index], np.int64)
    return lookups


def _recount(
    block: BlockRows, boundaries: Boundaries, features: Features, writer: pa.ipc.RecordBatchFileWriter
) -> np.ndarray:
    batch = read_block(block.file, block.index)
    trains = pa.array(split_of_block(block, boundaries, batch) == 0)
    lookups = []
    for name, num_values in zip(features.sparse, block.file.num_values[block.index], strict=True):
        codes = batch[name].filter(trains)
        codes = codes.flatten() if name in features.multi_hot else codes
        counts = np.bincount(codes.to_numpy(), minlength=num_values + 1)[1:]
        writer.write_batch(pa.record_batch([pa.array(counts.astype(np.int32))], schema=COUNTS_SCHEMA))
        lookups.append(len(codes))
    return np.array(lookups, np.int64)
