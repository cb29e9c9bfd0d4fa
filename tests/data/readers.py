"""Readers over small shards, the rows that they give, and what spoils a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import Dataset
from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from tests.data.shard_files import NUM_BUCKETS, tags_of


def make_reader(data: tuple[str, Dataset], rank: int = 0, world_size: int = 1, **changes: Any) -> ShardReader:
    config = ReaderConfig(num_streams=4, prefetch_batches=2)
    config = replace(config, **{key: changes.pop(key) for key in [*changes] if hasattr(config, key)})
    arguments = {"global_batch_size": 16, "seed": 7} | changes
    return ShardReader(*data, "train", rank=rank, world_size=world_size, config=config, **arguments)


def epoch_of(reader: ShardReader, epoch: int = 0, start_step: int = 0) -> list[Batch]:
    return list(reader.batches(epoch, start_step))


KEYS = ("row", "bucket", "tags", "last")


def samples_of(batch: Batch) -> list[tuple[Any, ...]]:
    """Every sample as (dense, ids of each feature, label, weight)."""
    bags = {key: tensor.to_dense() for key, tensor in batch.sparse_features.to_dict().items()}
    return [
        (
            tuple(batch.dense_features[i].tolist()),
            *(tuple(bags[key][i].tolist()) for key in KEYS),
            batch.labels[i].item(),
            batch.sample_weights[i].item(),
        )
        for i in range(batch.batch_size)
    ]


def rows_of(batches: list[Batch]) -> list[int]:
    """Row numbers in reading order, padding left out."""
    return [row for batch in batches for row in batch.sparse_features["row"].values().tolist()]


def sample_of(row: int) -> tuple[Any, ...]:
    ids = ((row,), (row * 7 % NUM_BUCKETS,), tuple(tags_of(row)), (row % 11,))
    return ((float(row), float(-row)), *ids, float(row % 3 == 0), 1.0)


PADDING = ((0.0, 0.0), (), (), (), (), 0.0, 0.0)


def spoil(column: str, values: Callable[[list[Any]], list[Any]]) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        field = table.schema.field(column)
        spoilt = pa.array(values(table.column(column).to_pylist()), field.type)
        return table.set_column(table.schema.get_field_index(column), field, spoilt)

    return change


SPOILT = {
    "id too large": (spoil("bucket", lambda ids: [*ids[:-1], 50]), "part-0.parquet row 31 bucket 50 [0 1 16"),
    "negative id": (spoil("row", lambda ids: [-1, *ids[1:]]), "row 0 -1 [0 32"),
    "id beyond int32": (lambda table: table.set_column(3, "row", pa.array([2**40, *range(1, 32)])), "row 0 1099511627776"),
    "id in a list": (spoil("tags", lambda tags: [*tags[:2], [3, 99], *tags[3:]]), "row 2 tags [3 99] [0 50"),
    "missing id": (spoil("last", lambda ids: [*ids[:5], None, *ids[6:]]), "row 5 last missing"),
    "missing list": (spoil("tags", lambda tags: [None, *tags[1:]]), "row 0 tags missing"),
    "missing id in a list": (spoil("tags", lambda tags: [[None], *tags[1:]]), "row 0 tags [None]"),
    "missing label": (spoil("label", lambda labels: [None, *labels[1:]]), "row 0 label missing"),
    "label 2": (spoil("label", lambda labels: [2, *labels[1:]]), "row 0 label 2"),
    "NaN label": (lambda table: table.set_column(0, "label", pa.array([float("nan"), *[1.0] * (len(table) - 1)])), "row 0 label nan"),
    "NaN": (spoil("int_1", lambda values: [float("nan"), *values[1:]]), "row 0 int_1 nan"),
    "infinity": (spoil("int_0", lambda values: [*values[:-1], float("inf")]), "row 31 int_0 inf"),
    "beyond float32": (lambda table: table.set_column(1, "int_0", pa.array([1e39, *[1.0] * (len(table) - 1)])), "row 0 int_0 1e+39"),
    "missing column": (lambda table: table.drop_columns(["bucket"]), "bucket"),
    "text for ids": (lambda table: table.set_column(4, "bucket", table["bucket"].cast(pa.string())), "bucket string"),
    "numbers for ids": (lambda table: table.set_column(4, "bucket", table["bucket"].cast(pa.float32())), "bucket float"),
    "ids for lists": (lambda table: table.set_column(5, "tags", table["last"]), "tags int32"),
}  # fmt: skip
