"""A tiny data set on disk whose every value tells the row it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.dataset import FILE_NAME, Dataset, FrequencyCurve, ShardFile, SparseFeature, Split

NUM_BUCKETS = 50
MAX_TAGS = 4


def tags_of(row: int) -> list[int]:
    """The list-valued feature of a row: 0 to 3 ids."""
    return [(row * 3 + k) % NUM_BUCKETS for k in range(row % MAX_TAGS)]


def table_of(rows: range) -> pa.Table:
    """label, int_0 and int_1, then row (the row's own number), bucket, tags (a list) and last."""
    numbers = np.array(rows, dtype=np.int64)
    return pa.table(
        {
            "label": pa.array(numbers % 3 == 0).cast(pa.int8()),
            "int_0": pa.array(numbers.astype(np.float32)),
            "int_1": pa.array((-numbers).astype(np.float32)),
            "row": pa.array(numbers.astype(np.int32)),
            "bucket": pa.array((numbers * 7 % NUM_BUCKETS).astype(np.int32)),
            "tags": pa.array([tags_of(row) for row in rows], pa.list_(pa.int32())),
            "last": pa.array((numbers % 11).astype(np.int32)),
        }
    )


def write_dataset(
    folder: Path,
    row_groups: Sequence[Sequence[int]],
    change: Callable[[pa.Table], pa.Table] = lambda table: table,
) -> Dataset:
    """Split `train`: one file for each list of row-group sizes. `change` may spoil a file's table."""
    num_rows = sum(map(sum, row_groups))
    files, begin = [], 0
    for index, sizes in enumerate(row_groups):
        path = folder / "train" / f"part-{index}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = change(table_of(range(begin, begin + sum(sizes))))
        with pq.ParquetWriter(path, table.schema, write_page_checksum=True) as writer:
            for size in sizes:
                writer.write_table(table.slice(0, size), row_group_size=max(sizes))
                table = table.slice(size)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(ShardFile(f"train/{path.name}", sum(sizes), path.stat().st_size, digest, list(sizes)))
        begin += sum(sizes)
    dataset = Dataset(
        name="tiny",
        label="label",
        dense_features=["int_0", "int_1"],
        sparse_features=[
            sparse_feature("row", num_rows),
            sparse_feature("bucket", NUM_BUCKETS),
            sparse_feature("tags", NUM_BUCKETS, multi_hot=True),
            sparse_feature("last", 11),
        ],
        splits={"train": Split(files, num_rows, len(range(0, num_rows, 3)))},
        source_rows=num_rows,
        accepted_rows=num_rows,
        quarantined_rows=0,
        dense_transform="none",
    )
    (folder / FILE_NAME).write_text(dataset.to_json())
    return dataset


def sparse_feature(name: str, cardinality: int, multi_hot: bool = False) -> SparseFeature:
    return SparseFeature(name, cardinality, multi_hot, 1.5 if multi_hot else 1.0, FrequencyCurve([1], [1.0]))
