"""Write a small prepared data set that replaces a missing one: random ids, values and labels."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.dataset import FILE_NAME, GROUP_COLUMN, Dataset, ShardFile, Split

ROWS_PER_GROUP = 16_384


def write_stand_in(dataset: Dataset, folder: str, num_rows: dict[str, int]) -> None:
    """Write the data set; a feature has one id per sample. num_rows: by split."""
    random = np.random.default_rng(0)
    splits = {}
    for split, count in num_rows.items():
        path = Path(folder, split, "00000.parquet")
        path.parent.mkdir(parents=True)
        table = _rows(dataset, count, random)
        pq.write_table(table, path, row_group_size=ROWS_PER_GROUP, write_page_checksum=True)
        groups = [min(ROWS_PER_GROUP, count - start) for start in range(0, count, ROWS_PER_GROUP)]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        file = ShardFile(f"{split}/{path.name}", count, path.stat().st_size, digest, groups)
        positives = int(np.count_nonzero(table[dataset.label].to_numpy()))
        splits[split] = Split([file], count, positives)
    total = sum(num_rows.values())
    made = replace(dataset, splits=splits, source_rows=total, accepted_rows=total)
    Path(folder, FILE_NAME).write_text(made.to_json())


def _rows(dataset: Dataset, count: int, random: np.random.Generator) -> pa.Table:
    columns: dict[str, np.ndarray] = {}
    for name in dataset.label_columns:
        columns[name] = random.integers(0, 2, count).astype(np.int8)
    if dataset.weight_column:
        columns[dataset.weight_column] = np.ones(count, np.float32)
    for name in dataset.dense_features:
        columns[name] = random.standard_normal(count).astype(np.float32)
    for feature in dataset.sparse_features:
        # Squared, so that some ids are frequent: a lookup's gradient then adds up, as in real data.
        drawn = random.random(count) ** 2 * feature.cardinality
        columns[feature.name] = drawn.astype(np.int32)
    if dataset.group_column:
        columns[GROUP_COLUMN] = random.integers(0, max(2, count // 8), count)
    fields = [pa.field(name, pa.from_numpy_dtype(values.dtype), nullable=False) for name, values in columns.items()]
    return pa.table(list(columns.values()), schema=pa.schema(fields))
