"""Small Criteo files, and what they must become, worked out in plain Python and one row at a time."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.data import DataConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.dataset import Dataset
from pipeline.data.prepare.run import prepare

NUM_DENSE, NUM_SPARSE = 13, 26


def random_lines(num_rows: int, seed: int = 0, distinct: int = 30) -> list[str]:
    """Rows with missing and negative values; ids are skewed, so that frequencies and ties both occur."""
    draw = random.Random(seed)
    lines = []
    for _ in range(num_rows):
        dense = ["" if draw.random() < 0.2 else str(draw.randint(-2, 500)) for _ in range(NUM_DENSE)]
        ids = [int(distinct * draw.random() ** 3) for _ in range(NUM_SPARSE)]
        sparse = ["" if draw.random() < 0.1 else f"{i * 2654435761 % 2**32:08x}" for i in ids]
        lines.append("\t".join([str(int(draw.random() < 0.3)), *dense, *sparse]))
    return lines


def write_lines(path: Path, lines: Sequence[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def run_prepare(source: str | None, path: Path | str, **settings: object) -> Dataset:
    """Settings of PrepareJob and of DataConfig, by name."""
    job_keys = {"memory_limit_gb", "threads", "temp_dir"}
    data = {"name": "rows", "path": str(path)} | {k: v for k, v in settings.items() if k not in job_keys}
    job = {k: v for k, v in settings.items() if k in job_keys}
    return prepare(PrepareJob(data=DataConfig(**data), source=source, **job)).dataset


def read_split(path: Path | str, dataset: Dataset, split: str) -> pa.Table:
    tables = [pq.read_table(Path(path) / file.path) for file in dataset.splits[split].files]
    return pa.concat_tables(tables)


def vocabularies(train: Sequence[str], min_frequency: int = 1, max_size: int | None = None) -> list[dict[str, int]]:
    """Value -> id for each categorical column, by descending frequency in `train`, ties by value."""
    columns = list(zip(*(line.split("\t")[1 + NUM_DENSE :] for line in train), strict=True))
    result = []
    for column in columns:
        counts = Counter(value for value in column if value)
        ranked = sorted(counts, key=lambda value: (-counts[value], value))
        kept = [value for value in ranked if counts[value] >= min_frequency][: max_size - 1 if max_size else None]
        result.append({value: i for i, value in enumerate(kept, start=1)})
    return result


def expected_rows(lines: Sequence[str], ids: list[dict[str, int]]) -> list[list[float]]:
    """[label, 13 dense, 26 ids] of each line; unknown, rare and missing values are id 0."""
    rows = []
    for line in lines:
        cells = line.split("\t")
        dense = [float(np.float32(math.log1p(max(float(cell or 0), 0.0)))) for cell in cells[1 : 1 + NUM_DENSE]]
        rows.append([float(cells[0]), *dense, *(ids[i].get(cell, 0) for i, cell in enumerate(cells[1 + NUM_DENSE :]))])
    return rows


def assert_rows_equal(table: pa.Table, lines: Sequence[str], ids: list[dict[str, int]]) -> None:
    found = np.array([column.to_pylist() for column in table.columns]).T
    expected = np.array(expected_rows(lines, ids))
    assert found.shape == expected.shape
    np.testing.assert_allclose(found[:, 1 : 1 + NUM_DENSE], expected[:, 1 : 1 + NUM_DENSE], rtol=2e-7)
    np.testing.assert_array_equal(
        np.delete(found, range(1, 1 + NUM_DENSE), 1), np.delete(expected, range(1, 1 + NUM_DENSE), 1)
    )
