"""Shards for the small sharded model of tests/support/sharded_models.py, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.dataset import FILE_NAME, Dataset, ShardFile, Split
from pipeline.runtime.storage import storage
from tests.support.datasets import described_dataset
from tests.support.sharded_models import CARDINALITIES

Change = Callable[[dict[str, list[Any]]], None]


def write_shards(folder: Path, row_groups: list[list[int]], changes: dict[int, Change] | None = None) -> Dataset:
    """Splits `train` and `validation` share the files; changes[i] spoils the columns of file i."""
    files, draw = [], np.random.default_rng(5)
    (folder / "train").mkdir(parents=True)
    for index, sizes in enumerate(row_groups):
        count = sum(sizes)
        columns: dict[str, list[Any]] = {"label": draw.integers(0, 2, count).tolist()}
        columns |= {name: draw.normal(size=count).tolist() for name in ("int_0", "int_1")}
        columns |= {name: draw.integers(0, size, count).tolist() for name, size in CARDINALITIES.items()}
        (changes or {}).get(index, lambda columns: None)(columns)
        table, path = pa.table(columns), folder / "train" / f"{index:05d}.parquet"
        with pq.ParquetWriter(path, table.schema, write_page_checksum=True) as writer:
            for size in sizes:
                writer.write_table(table.slice(0, size), row_group_size=max(sizes))
                table = table.slice(size)
        files.append(ShardFile(f"train/{path.name}", count, path.stat().st_size, storage.sha256_of(str(path)), sizes))
    described = described_dataset(CARDINALITIES)
    split = Split(files, sum(map(sum, row_groups)), 1)
    described.splits.update({"train": split, "validation": split})
    (folder / FILE_NAME).write_text(described.to_json())
    return described


def put(column: str, row: int, value: Any) -> Change:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][row] = value

    return change
