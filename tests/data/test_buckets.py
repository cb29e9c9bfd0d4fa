"""Numbers in buckets: learnt from training rows, the same ids in shards and in the serving path, by vocabulary and base."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.checkpoint.vocabularies import read_values
from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import BaseVocabularyConfig, BucketsConfig, DataConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.prepare.buckets import Counted, boundaries_of
from pipeline.data.prepare.run import prepare
from pipeline.data.raw.dense_transforms import bucket_numbers
from pipeline.data.read.value_index import index_values
from pipeline.runtime.errors import ConfigError, DataError
from pipeline.serving.artifact.raw_schema import RawFeature, schema_of
from pipeline.serving.scoring.raw_rows import RowEncoder
from pipeline.serving.scoring.scorer import ColumnLists
from tests.data.criteo_rows import read_split
from tests.support.messages import names

COLUMNS = ColumnsConfig(label="click", dense=["age", "price", "count"], sparse=["item"], multi_hot=["tags"])
BUCKETS = {"price": BucketsConfig(num_buckets=5), "count": BucketsConfig("log2")}
NUM_ROWS, NUM_TRAIN = 300, 200


def counted(values: np.ndarray, batch: int) -> Callable[[], Iterator[Counted]]:
    distinct, rows = np.unique(values, return_counts=True)
    return lambda: ((distinct[i : i + batch], rows[i : i + batch]) for i in range(0, len(distinct), batch))


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_quantile_buckets_hold_as_many_rows_each_as_ties_allow(batch: int) -> None:
    spread = np.random.default_rng(0).normal(size=1000)
    found = boundaries_of(BucketsConfig(num_buckets=8), counted(spread, batch))
    assert np.bincount(bucket_numbers(spread, found)).tolist() == [125] * 8
    tied = np.array([0.0] * 60 + [1.0] * 5 + [2.0] * 5 + [3.0] * 30)
    assert boundaries_of(BucketsConfig(num_buckets=10), counted(tied, batch)) == [1.0, 3.0]
    assert boundaries_of(BucketsConfig(num_buckets=4), counted(tied[:60], batch)) == []


def test_log2_buckets_follow_the_published_rule_without_its_collisions() -> None:
    values = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, *np.arange(3.0, 3000.0)])
    numbers = bucket_numbers(values, boundaries_of(BucketsConfig("log2"), counted(values, 100)))
    large = np.array([math.floor(math.log(value) ** 2) for value in values[5:]])
    assert numbers[:5].tolist() == [0, 1, 2, 3, 4]
    assert len(set(zip(numbers[5:].tolist(), large.tolist(), strict=True))) == len(set(large)) == len(set(numbers[5:]))
    assert (np.diff(numbers) >= 0).all() and numbers[5] > 4
    nothing: list[Counted] = []
    assert boundaries_of(BucketsConfig("log2"), lambda: iter(nothing)) == []


def test_a_missing_value_is_in_no_bucket() -> None:
    assert bucket_numbers(np.array([math.nan, 0.5, 1.0, 9.0]), [1.0, 2.0]).tolist() == [-1, 0, 1, 2]


Row = dict[str, Any]


def rows_of(num_rows: int = NUM_ROWS) -> list[Row]:
    draw = np.random.default_rng(1)

    def number(value: float) -> float | None:
        return None if draw.random() < 0.1 else value

    return [
        {
            "click": int(draw.integers(2)),
            "age": number(float(draw.integers(90))),
            "price": number(round(float(draw.exponential()) + (i >= NUM_TRAIN), 3)),
            "count": number(float(int(draw.exponential(20) ** 1.5) - 1)),
            "item": f"i{draw.integers(7)}",
            "tags": [f"t{t}" for t in draw.integers(4, size=draw.integers(3))],
        }
        for i in range(num_rows)
    ]


def write(path: Path, rows: list[Row]) -> str:
    cells = [
        ["" if row[name] is None else "|".join(row[name]) if name == "tags" else str(row[name]) for name in row]
        for row in rows
    ]
    path.write_text("\n".join([",".join(rows[0]), *map(",".join, cells)]) + "\n")
    return str(path)


def run(folder: Path, source: str, base: BaseVocabularyConfig | None = None, **settings: Any) -> Dataset:
    options = {
        "columns": COLUMNS,
        "buckets": BUCKETS,
        "split": SplitConfig(validation_fraction=1 / 3, test_fraction=0.0),
    }
    data = DataConfig("b", str(folder), "csv", **options | settings)
    return prepare(PrepareJob(data=data, source=source, threads=1, vocabularies=base)).dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("buckets")
    run(made / "ds", write(made / "rows.csv", rows_of()))
    return made


def ids_by_hand(values: list[float | None], boundaries: list[float]) -> list[int]:
    """Of all rows; ids by frequency in the first NUM_TRAIN."""
    buckets = [None if value is None else sum(value >= b for b in boundaries) for value in values]
    counts = Counter(bucket for bucket in buckets[:NUM_TRAIN] if bucket is not None)
    ranked = sorted(counts, key=lambda bucket: (-counts[bucket], bucket))
    return [0 if bucket not in counts else 1 + ranked.index(bucket) for bucket in buckets]


def test_ids_in_shards_are_those_of_buckets_learnt_from_training_rows(folder: Path) -> None:
    dataset, rows = load_dataset(f"{folder}/ds"), rows_of()
    assert dataset.dense_features == ["age"]
    assert dataset.sparse_feature_names == ["item", "tags", "price", "count"]
    shards = pa.concat_tables([read_split(folder / "ds", dataset, split) for split in ("train", "validation")])
    for name in ("price", "count"):
        feature, values = dataset.sparse_feature(name), [row[name] for row in rows]
        assert feature.boundaries is not None
        ids = shards[name].to_pylist()
        assert ids == ids_by_hand(values, feature.boundaries)
        assert feature.cardinality == max(ids) + 1
        assert feature.frequency_curve.shares[-1] == 1.0
    prices = sorted(row["price"] for row in rows[:NUM_TRAIN] if row["price"] is not None)
    boundaries = dataset.sparse_feature("price").boundaries or []
    shares = np.diff([0, *np.searchsorted(prices, boundaries), len(prices)]) / len(prices)
    assert shares == pytest.approx([0.2] * 5, abs=0.02)


@pytest.mark.parametrize("way", ["table", "few"])
def test_raw_rows_get_the_ids_of_the_shards_when_they_are_scored(folder: Path, way: str) -> None:
    dataset, rows = load_dataset(f"{folder}/ds"), rows_of()
    keys = ["price", "item", "tags", "count"]  # in the order of a model
    schema = schema_of(dataset, keys, ColumnsConfig(), {})
    assert schema.columns == {"age": "dense", "price": "dense", "count": "dense", "item": "sparse", "tags": "multi_hot"}
    schema.features[:] = [RawFeature(**json.loads(json.dumps(vars(feature)))) for feature in schema.features]
    vocabularies = {
        name: index_values(read_values(f"{folder}/ds/{dataset.sparse_feature(name).vocabulary}")) for name in keys
    }
    encoder = RowEncoder(schema, vocabularies)
    columns = {name: [row[name] for row in rows] for name in ("age", "price", "count", "item", "tags")}
    table = pa.table(columns)
    given = ColumnLists(table.schema, list(columns.values()), len(rows)) if way == "few" else table
    if way == "table":
        encoder._is_simple = lambda schema: False
    encoded = encoder.encode(given)
    shards = pa.concat_tables([read_split(folder / "ds", dataset, split) for split in ("train", "validation")])
    begin = 0
    for name in keys:
        lists = [[ids] if isinstance(ids, int) else ids for ids in shards[name].to_pylist()]
        expected = [id_ for ids in lists for id_ in ids]
        assert encoded.values[begin : begin + len(expected)].tolist() == expected
        begin += len(expected)
    assert encoded.dense.flatten().tolist() == shards["age"].to_pylist()


def test_a_base_keeps_boundaries_and_where_it_is_frozen_ids(folder: Path, tmp_path: Path) -> None:
    rows = rows_of()[NUM_TRAIN:]
    source, base = write(tmp_path / "later.csv", rows), load_dataset(f"{folder}/ds")
    frozen = run(tmp_path / "frozen", source, BaseVocabularyConfig(f"{folder}/ds", frozen=True))
    extended = run(tmp_path / "extended", source, BaseVocabularyConfig(f"{folder}/ds"))
    for name in ("price", "count"):
        features = [dataset.sparse_feature(name) for dataset in (base, frozen, extended)]
        assert features[0].boundaries == features[1].boundaries == features[2].boundaries
        files = [
            list(read_values(f"{where}/{features[0].vocabulary}"))
            for where in (folder / "ds", tmp_path / "frozen", tmp_path / "extended")
        ]
        assert files[0] == files[1]
        assert {value for _, values in files[0] for value in values} <= {v for _, values in files[2] for v in values}
    added = BUCKETS | {"age": BucketsConfig()}
    more = run(tmp_path / "more", source, BaseVocabularyConfig(f"{folder}/ds"), buckets=added)
    assert more.sparse_feature("price").boundaries == base.sparse_feature("price").boundaries
    assert len(more.sparse_feature("age").boundaries) > 1


def test_numbers_alone_are_data_and_what_is_no_dense_column_is_refused(folder: Path, tmp_path: Path) -> None:
    alone = ColumnsConfig(label="click", dense=["age", "price"])
    dataset = run(tmp_path / "ds", f"{folder}/rows.csv", columns=alone, buckets={"*": BucketsConfig(num_buckets=3)})
    assert dataset.dense_features == []
    assert [(feature.name, feature.cardinality) for feature in dataset.sparse_features] == [("age", 4), ("price", 4)]
    with pytest.raises(ConfigError, match=names("data.buckets 'prize' 'price'")):
        run(tmp_path / "other", f"{folder}/rows.csv", buckets={"prize": BucketsConfig()})
    with pytest.raises(DataError, match=names("data.columns")):
        run(tmp_path / "none", f"{folder}/rows.csv", columns=ColumnsConfig(label="click"), buckets={})
