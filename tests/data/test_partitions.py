"""Folders as Spark and Hive write them: columns in their names, ranges of days, and what is no data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig, SplitConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import PrepareSummary, prepare
from pipeline.data.raw.partitions import NULL, name_of, partitions_of
from pipeline.data.raw.source import find_sources
from pipeline.runtime.errors import ConfigError, DataError
from tests.data.criteo_rows import read_split

DAYS = ("2026-10-31", "2026-11-01", "2026-11-02", "2026-11-03")


def _write(folder: Path, rows: int = 4, text: str = "") -> None:
    folder.mkdir(parents=True)
    for part in range(2):
        table = pa.table({"y": [n % 2 for n in range(rows)], "c": [f"{part}"] * rows})
        if text:
            lines = ["y,c", *(f"{n % 2},{part}" for n in range(rows))]
            (folder / f"part-{part:05d}.csv").write_text(text.join(lines))
        else:
            pq.write_table(table, folder / f"part-{part:05d}.parquet")
        (folder / f".part-{part:05d}.parquet.crc").write_bytes(b"crc")
    (folder / "_temporary" / "0").mkdir(parents=True)
    (folder / "_temporary" / "0" / "part-00009.parquet").write_bytes(b"half a file")
    (folder / "part-00000.crc").write_bytes(b"crc")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    for day in DAYS:
        _write(tmp_path / "clicks" / f"dt={day}")
        (tmp_path / "clicks" / f"dt={day}" / "_SUCCESS").touch()
    return tmp_path / "clicks"


def _prepare(tmp_path: Path, source: object, columns: dict[str, Any] | None = None, **settings: Any) -> PrepareSummary:
    columns = columns or {"label": "y", "sparse": ["c", "dt"]}
    given = {"format": "parquet", "split": SplitConfig(validation_fraction=0.0, test_fraction=0.0), **settings}
    data = DataConfig(name="rows", path=str(tmp_path / "data"), columns=ColumnsConfig(**columns), **given)
    return prepare(PrepareJob(data=data, source=str(source)))


def _days(paths: list[str]) -> list[str]:
    return sorted({str(partitions_of(path)[0][1]) for path in paths})


def test_a_folder_of_partitions_is_its_files_without_what_is_no_data(table: Path) -> None:
    sources = find_sources(str(table))
    assert [source.name for source in sources] == [f"dt={day}/part-0000{n}.parquet" for day in DAYS for n in (0, 1)]
    assert sources[0].partitions == (("dt", DAYS[0]),)
    for pattern in ("dt=*", "dt=*/*", "**/*"):
        assert find_sources(f"{table}/{pattern}") == sources


@pytest.mark.parametrize(
    ("pattern", "days"),
    [
        ("dt={2026-11-01..2026-11-03}", DAYS[1:]),
        ("dt={2026-10-31..2026-11-01}/*.parquet", DAYS[:2]),
        ("dt={2026-11-02..2026-11-02}/part-{00000..00001}.parquet", DAYS[2:3]),
    ],
)
def test_a_range_of_days_names_their_folders(table: Path, pattern: str, days: tuple[str, ...]) -> None:
    sources = find_sources(f"{table}/{pattern}")
    assert _days([source.path for source in sources]) == list(days) and len(sources) == 2 * len(days)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("dt={2026-10-30..2026-11-05}", r"3 are missing in .*: 2026-10-30, 2026-11-04, 2026-11-05; fetch them"),
        ("dt={2026-11-03..2026-11-01}", "not a range of numbers or dates; write the smaller value first"),
        ("dt={2026-11-03..7}", "not a range of numbers or dates"),
    ],
)
def test_a_range_with_a_missing_day_is_refused_by_name(table: Path, pattern: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_sources(f"{table}/{pattern}")


def test_the_folders_value_is_a_column_and_rows_may_be_split_by_it(tmp_path: Path, table: Path) -> None:
    columns = {"label": "y", "sparse": ["c", "dt"], "timestamp": "dt"}
    split = SplitConfig(kind="date", validation_from="2026-11-02", test_from="2026-11-03")
    dataset = _prepare(tmp_path, table, columns, split=split).dataset
    assert {name: split.num_rows for name, split in dataset.splits.items()} == {"train": 16, "validation": 8, "test": 8}
    days = read_split(tmp_path / "data", dataset, "train")["dt"].to_pylist()
    assert sorted(days) == [1] * 8 + [2] * 8  # both have an id, the first of equal counts the smaller
    assert set(read_split(tmp_path / "data", dataset, "test")["dt"].to_pylist()) == {0}
    assert next(source["path"] for source in dataset.sources) == f"dt={DAYS[0]}/part-00000.parquet"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_text_files_get_the_columns_too(tmp_path: Path, end: str) -> None:
    for place in ("a,b", "c%20%22d%22", NULL):
        _write(tmp_path / "clicks" / f"place={place}" / "hour=7", text=end)
    columns = {"label": "y", "sparse": ["c", "place"], "dense": ["hour"]}
    dataset = _prepare(tmp_path, tmp_path / "clicks", columns, format="csv", dense_transform="none").dataset
    rows = read_split(tmp_path / "data", dataset, "train")
    assert dataset.accepted_rows == 24 and set(rows["hour"].to_pylist()) == {7.0}
    assert sorted(rows["place"].to_pylist()) == [0] * 8 + [1] * 8 + [2] * 8
    vocabulary = pq.read_table(tmp_path / "data" / dataset.sparse_feature("place").vocabulary)
    assert {"a,b", 'c "d"'} <= {str(value) for column in vocabulary.columns for value in column.to_pylist()}


def test_a_value_that_is_not_a_number_is_refused_and_objects_get_the_columns(tmp_path: Path, table: Path) -> None:
    with pytest.raises(DataError, match=r"the folder name has dt=2026-10-31, but 'dt' is a number in data.columns"):
        _prepare(tmp_path, table, {"label": "y", "sparse": ["c"], "dense": ["dt"]})
    folder = tmp_path / "lines" / "dt=1"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text('{"y": 1, "c": "a"}\n' * 4)
    _prepare(tmp_path / "other", tmp_path / "lines", {"label": "y", "sparse": ["c", "dt"]}, format="jsonl")
    vocabulary = pq.read_table(tmp_path / "other" / "data" / "vocabulary" / "dt.parquet")["value"].to_pylist()
    assert vocabulary == ["1"]


def test_a_folder_without_success_is_reported_refused_or_ignored(
    tmp_path: Path, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (table / "dt=2026-11-02" / "_SUCCESS").unlink()
    with pytest.raises(DataError, match=r"1 of 4 folders hold no _SUCCESS.*dt=2026-11-02\): is the job still writing"):
        _prepare(tmp_path, table, success_file="required")
    _prepare(tmp_path / "ignored", table, success_file="ignored")
    assert "_SUCCESS" not in caplog.text
    _prepare(tmp_path / "reported", table)
    assert "1 of 4 folders hold no _SUCCESS" in caplog.text
    (table / "_SUCCESS").touch()  # of a job that wrote all partitions
    _prepare(tmp_path / "whole", table, success_file="required")
    with pytest.raises(ConfigError, match="success_file"):
        _prepare(tmp_path, table, success_file="yes")


def test_names_and_values_of_partitions() -> None:
    assert partitions_of(f"a/dt=2026-01-01/place=a%2Fb/x={NULL}/y=/f") == (
        ("dt", "2026-01-01"),
        ("place", "a/b"),
        ("x", None),
        ("y", ""),
    )
    assert name_of("a/dt=1/hour=2/f.parquet") == "dt=1/hour=2/f.parquet" and name_of("a/b/f=1.tsv") == "f=1.tsv"
