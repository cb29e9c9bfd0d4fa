"""Splits that exist: their rows and ids, what they share, and what is refused."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, IdsConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.data.dataset import Dataset, load_dataset
from pipeline.data.prepare import resources
from pipeline.data.prepare.row_hashes import RowHashes
from pipeline.data.prepare.run import describe, prepare
from pipeline.runtime.errors import ConfigError, DataError
from tests.data.criteo_rows import read_split
from tests.support.messages import mentions, names

COLUMNS = ColumnsConfig(label="click", dense=["price"], sparse=["user", "item"], multi_hot=["tags"])
Row = tuple[int, float | None, str, str, str]


def rows_of(count: int, seed: int) -> list[Row]:
    draw = np.random.default_rng(seed)
    return [
        (
            int(i % 3 == 0),
            float(draw.integers(1000)),
            f"u{draw.integers(6) + seed}",
            f"i{draw.integers(9)}",
            "|".join(f"t{t}" for t in draw.integers(4, size=draw.integers(4))),
        )
        for i in range(count)
    ]


def write(path: Path, rows: list[Row]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(["" if cell is None else str(cell) for cell in row]) for row in rows]
    path.write_text("\n".join(["click,price,user,item,tags", *lines]) + "\n")
    return str(path)


def run(folder: Path, split: SplitConfig, **settings: object) -> Dataset:
    data = DataConfig("given", str(folder), "csv", COLUMNS, split=split, **settings)
    return prepare(PrepareJob(data=data, threads=1)).dataset


@pytest.fixture
def files(tmp_path: Path) -> SplitConfig:
    """Two files of train, one of validation and one of test; the names of the last two are equal."""
    for part in range(2):
        write(tmp_path / "train" / f"part_{part}.csv", rows_of(150, part))
    return SplitConfig(
        kind="given",
        train=f"{tmp_path}/train/part_{{0..1}}.csv",
        validation=write(tmp_path / "a" / "rows.csv", rows_of(40, 2)),
        test=write(tmp_path / "b" / "rows.csv", rows_of(50, 3)),
    )


def test_each_split_has_the_rows_of_its_files_and_train_alone_gives_ids(
    tmp_path: Path, files: SplitConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", 1_000)
    monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", 1_000)
    dataset = run(tmp_path / "ds", files, rows_per_shard=90, rows_per_row_group=25, ids=IdsConfig(min_frequency=2))
    expected = {"train": rows_of(150, 0) + rows_of(150, 1), "validation": rows_of(40, 2), "test": rows_of(50, 3)}
    assert {name: split.num_rows for name, split in dataset.splits.items()} == {
        name: len(rows) for name, rows in expected.items()
    }
    counts: dict[str, int] = {}
    for row in expected["train"]:
        counts[row[2]] = counts.get(row[2], 0) + 1
    ranked = sorted((value for value in counts if counts[value] >= 2), key=lambda value: (-counts[value], value))
    ids = {value: number for number, value in enumerate(ranked, start=1)}
    for split, rows in expected.items():
        table = read_split(tmp_path / "ds", dataset, split)
        assert table.schema.names == ["click", "price", "user", "item", "tags"]
        assert table["click"].to_pylist() == [row[0] for row in rows]
        assert table["user"].to_pylist() == [ids.get(row[2], 0) for row in rows]
        np.testing.assert_allclose(table["price"].to_numpy(), [np.log1p(row[1]) for row in rows], rtol=1e-6)
    assert "u8" not in pq.read_table(tmp_path / "ds" / "vocabulary" / "user.parquet")["value"].to_pylist()  # test's own
    assert [source["split"] for source in dataset.sources] == ["train", "train", "validation", "test"]
    assert load_dataset(str(tmp_path / "ds")) == dataset


def test_the_same_files_elsewhere_are_prepared_already_and_other_splits_of_them_are_not(
    tmp_path: Path, files: SplitConfig
) -> None:
    run(tmp_path / "ds", files)
    moved = {
        key: value.replace(str(tmp_path), f"{tmp_path}/moved") if isinstance(value, str) else value
        for key, value in asdict(files).items()
    }
    os.makedirs(tmp_path / "moved")
    for folder in ("train", "a", "b"):
        os.rename(tmp_path / folder, tmp_path / "moved" / folder)
    data = DataConfig("given", str(tmp_path / "ds"), "csv", COLUMNS, split=SplitConfig(**moved))
    assert prepare(PrepareJob(data=data)).already_prepared
    swapped = {**moved, "validation": moved["test"], "test": moved["validation"]}
    with pytest.raises(DataError, match=names("rows.csv another")):
        run(tmp_path / "ds", SplitConfig(**swapped))


def test_rows_in_two_splits_are_counted_and_refused_above_a_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train, fresh = rows_of(100, 0), [(1, None, "new", f"i{i}", "t1|t2") for i in range(30)]
    split = SplitConfig(
        kind="given",
        train=write(tmp_path / "train.csv", train),
        validation=write(tmp_path / "valid.csv", [*fresh[:16], *train[:4]]),
        test=write(tmp_path / "test.csv", [*fresh[14:], train[50], (1, None, "new", "i20", "t2|t1")]),
    )
    with caplog.at_level(logging.WARNING):
        dataset = run(tmp_path / "ds", split)
    # Of test, one row is in train and two in validation; the same tags in another order are another row.
    assert dataset.shared_rows == {"validation": 4, "test": 3}
    assert mentions(caplog.text, "4 20 validation 3 18 test")
    job = PrepareJob(data=DataConfig("given", str(tmp_path / "ds"), "csv", COLUMNS, split=split))
    assert mentions(describe(prepare(job)), "4 20.00% 3 16.67%")
    split.max_shared_fraction = 0.18
    with pytest.raises(DataError, match=names("4 20 'validation' 18.00% data.split.max_shared_fraction")):
        run(tmp_path / "strict", split)


def test_a_split_may_be_left_out_and_parquet_has_the_same_hashes(tmp_path: Path) -> None:
    rows = rows_of(60, 0)
    columns = [list(column) for column in zip(*rows, strict=True)]
    columns[4] = [text.split("|") if text else [] for text in columns[4]]
    pq.write_table(pa.table(columns, names=["click", "price", "user", "item", "tags"]), tmp_path / "rows.parquet")
    pq.write_table(
        pa.table(columns, names=["click", "price", "user", "item", "tags"]).slice(50), tmp_path / "t.parquet"
    )
    split = SplitConfig(kind="given", train=str(tmp_path / "rows.parquet"), test=str(tmp_path / "t.parquet"))
    data = DataConfig("given", str(tmp_path / "ds"), "parquet", COLUMNS, split=split)
    with pytest.raises(DataError, match=names("10 of 'test' 100.00% 50.00%")):
        prepare(PrepareJob(data=data))
    split.max_shared_fraction = 1.0
    dataset = prepare(PrepareJob(data=data)).dataset
    assert [dataset.splits[name].num_rows for name in ("train", "validation", "test")] == [60, 0, 10]
    assert dataset.shared_rows == {"test": 10}


def test_a_file_in_two_splits_is_refused_by_name(tmp_path: Path, files: SplitConfig) -> None:
    twice = SplitConfig(kind="given", train=files.train, test=f"{tmp_path}/train/part_*")
    with pytest.raises(DataError, match=names("part_0.csv data.split.test data.split.train")):
        run(tmp_path / "ds", twice)
    copy = write(tmp_path / "copy.csv", rows_of(40, 2))
    with pytest.raises(DataError, match=names("copy.csv rows.csv data.split.test data.split.validation bytes")):
        run(tmp_path / "ds", SplitConfig(kind="given", train=files.train, validation=files.validation, test=copy))
    with pytest.raises(DataError, match=names("data.split.test missing.csv")):
        run(tmp_path / "ds", SplitConfig(kind="given", train=files.train, test=str(tmp_path / "missing.csv")))
    empty = write(tmp_path / "empty.csv", [])
    with pytest.raises(DataError, match=names("data.split.validation")):
        run(tmp_path / "ds", SplitConfig(kind="given", train=files.train, validation=empty))


def test_sources_and_splits_that_contradict_each_other_are_refused() -> None:
    data = DataConfig("given", "ds", "csv", COLUMNS, split=SplitConfig(kind="given", train="train.csv"))
    with pytest.raises(ConfigError, match=names("source=rows.csv data.split.train=train.csv")):
        PrepareJob(data=data, source="rows.csv")
    with pytest.raises(ConfigError, match=names("data.split.train=")):
        PrepareJob(data=DataConfig("given", "ds", split=SplitConfig(kind="given", test="test.csv")))
    with pytest.raises(ConfigError, match=names("source")):
        PrepareJob(data=DataConfig("given", "ds"))
    with pytest.raises(ConfigError, match=names("split.test='test.csv' split.kind=given")):
        SplitConfig(test="test.csv")
    with pytest.raises(ConfigError, match=names("retrain data.split.kind=given")):
        RetrainJob(name="stream", run_dir="runs/stream", source="windows", data=data)


def test_row_hashes_tell_missing_values_lists_and_their_order_apart() -> None:
    distinct, hashes = pa.array(["a", "b"]), RowHashes(6)
    hashes.add_numbers(np.array([0.0, -0.0, np.nan, 0.0, 0.0, 0.0]))
    hashes.add_texts(np.array([1, 1, 1, 0, 1, 1]), distinct, None)
    hashes.add_texts(np.array([1, 2, 1, 2, 1, 2, 1, 2, 2, 1]), distinct, np.array([2, 2, 2, 2, 2, 0]))
    found = hashes.finish()
    assert found[0] == found[1]
    assert len(set(found.tolist())) == 5
