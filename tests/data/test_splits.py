"""Rows divided at random, by user, by date and by time, and columns of times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.data import SplitConfig
from pipeline.data.prepare.time_units import count_units
from pipeline.runtime.errors import ConfigError, DataError
from tests.data.sources import prepare_rows, rows_of, write_lines
from tests.support.messages import mentions, names


def _split_source(tmp_path: Path) -> Path:
    lines = [f"{n % 2},{n},u{n % 97},{1000 + n * 7 % 500}" for n in range(3000)]
    return write_lines(tmp_path / "rows.csv", ["y,x,user,t", *lines])


@pytest.mark.parametrize("kind", ["random", "user"])
def test_rows_are_divided_at_random_or_by_user_whatever_the_blocks(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"label": "y", "dense": ["x"], "sparse": ["user"]}
    source, settings = _split_source(tmp_path), {"dense_transform": "none", "group_column": "user"}
    split = SplitConfig(kind=kind, validation_fraction=0.2, test_fraction=0.1)
    dataset = prepare_rows(tmp_path, source, columns, split=split, **settings).dataset
    held = {name: np.array(rows_of(tmp_path, dataset, name)["x"], np.int64) for name in dataset.splits}
    assert sorted(np.concatenate(list(held.values()))) == list(range(3000))
    assert 0.6 < len(held["train"]) / 3000 < 0.8 and 0.04 < len(held["test"]) / 3000 < 0.17
    if kind == "user":
        users = [set(rows % 97) for rows in held.values()]
        assert not users[0] & users[1] and not users[0] & users[2] and not users[1] & users[2]
    from pipeline.data.prepare import resources

    monkeypatch.setattr(resources, "MIN_BLOCK_BYTES", 3_000)
    monkeypatch.setattr(resources, "MAX_BLOCK_BYTES", 3_000)
    again = prepare_rows(tmp_path / "small", source, columns, split=split, **settings).dataset
    assert rows_of(tmp_path / "small", again, "test")["x"] == held["test"].tolist()
    other = SplitConfig(kind=kind, validation_fraction=0.2, test_fraction=0.1, seed=1)
    changed = prepare_rows(tmp_path / "seed", source, columns, split=other, **settings).dataset
    assert rows_of(tmp_path / "seed", changed, "test")["x"] != held["test"].tolist()


def test_rows_are_divided_at_dates(tmp_path: Path) -> None:
    columns = {"label": "y", "dense": ["x"], "timestamp": "t"}
    source = _split_source(tmp_path)
    split = SplitConfig(kind="date", validation_from="1300", test_from="1400")
    dataset = prepare_rows(tmp_path, source, columns, split=split, dense_transform="none").dataset
    for name, (first, end) in {"train": (1000, 1300), "validation": (1300, 1400), "test": (1400, 1500)}.items():
        times = {1000 + int(x) * 7 % 500 for x in rows_of(tmp_path, dataset, name)["x"]}
        assert times == set(range(first, end))
    with pytest.raises(DataError, match=names("validation_from=1300 test_from=1300")):
        late = SplitConfig(kind="date", validation_from="1300", test_from="1300")
        prepare_rows(tmp_path / "late", source, columns, split=late)
    with pytest.raises(ConfigError, match=names("validation_from date")):
        SplitConfig(kind="date")
    with pytest.raises(DataError, match=names("validation_from=2026-01-01 test_from")):  # of a column of small numbers
        prepare_rows(tmp_path / "dates", source, columns, split=SplitConfig(kind="date", validation_from="2026-01-01"))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_what_is_no_time_goes_to_the_quarantine_in_every_format(tmp_path: Path, kind: str) -> None:
    """Fractions of seconds, words, and dates beside whole numbers, which are of another unit."""
    for name, times, bad in (
        ("numbers", ["1000", "1001", "1002", "1003.5", "never", "2026-01-01"], 3),
        ("dates", ["2026-01-03", "2026-01-02T10:00:00Z", "2026-01-02", "1003", "x"], 2),
    ):
        table = pa.table({"y": [0] * len(times), "c": ["a"] * len(times), "t": times})
        source = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(table, source)
        elif kind == "csv":
            write_lines(source, ["y,c,t", *(f"0,a,{each}" for each in times)])
        else:
            write_lines(source, [json.dumps(row) for row in table.to_pylist()])
        columns = {"label": "y", "sparse": ["c"], "timestamp": "t"}
        settings: dict[str, Any] = {"split": SplitConfig(kind="time"), "max_quarantined_fraction": 0.6}
        dataset = prepare_rows(tmp_path / name, source, columns, format=kind, **settings).dataset
        assert (dataset.accepted_rows, dataset.quarantined_rows) == (len(times) - bad, bad)
    pq.write_table(pa.table({"y": [0], "c": ["a"], "t": [1003.5]}), tmp_path / "fractions.parquet")
    with pytest.raises(DataError, match=names("1 of 1 t 1003.5 time")):
        prepare_rows(
            tmp_path / "fractions", tmp_path / "fractions.parquet", columns, format="parquet", split=settings["split"]
        )


def _times(tmp_path: Path, name: str, times: Sequence[object]) -> None:
    write_lines(tmp_path / name, ["y,c,t", *(f"{n % 2},a,{time}" for n, time in enumerate(times))])


def test_times_in_two_units_are_refused_and_a_few_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns, split = {"label": "y", "sparse": ["c"], "timestamp": "t"}, SplitConfig(kind="time")
    seconds = range(1764000000, 1764000030)
    folder = tmp_path / "rows"
    folder.mkdir()
    _times(folder, "1.csv", seconds)
    for name, times in {"2.csv": [each * 1000 for each in seconds], "3.csv": ["2026-01-01"] * 4}.items():
        _times(folder, name, times)
        unit = "milliseconds" if name == "2.csv" else "microseconds"
        with pytest.raises(DataError, match=names(f"=t 30 seconds 1.csv {len(times)} {unit} {name}")):
            prepare_rows(tmp_path / name, folder, columns, split=split)
        (folder / name).unlink()
    _times(folder, "2.csv", [seconds[0] * 1000])
    with caplog.at_level("WARNING"):
        summary = prepare_rows(tmp_path / "few", folder, columns, split=split, max_quarantined_fraction=0.05)
    assert summary.dataset.accepted_rows == 31 and mentions(caplog.text, "=t 30 seconds 1 milliseconds 2.csv")


def test_numbers_that_are_no_epochs_have_no_unit() -> None:
    assert count_units(np.array([0, 17, 10**11, 5 * 10**13, -(10**9)])) == {}
    assert count_units(np.array([], np.int64)) == {}
    assert count_units(np.array([1_764_000_000, 3, 1_764_000_000_000_000_000])) == {"seconds": 1, "nanoseconds": 1}


@pytest.mark.parametrize("kind", [pa.time32("ms"), pa.duration("s")], ids=["time of day", "span"])
def test_a_time_without_a_date_is_no_timestamp(tmp_path: Path, kind: pa.DataType) -> None:
    source = tmp_path / "rows.parquet"
    times = pa.array([1, 2], pa.int32() if kind == pa.time32("ms") else pa.int64()).cast(kind)
    pq.write_table(pa.table({"y": [0, 1], "c": ["a", "b"], "t": times}), source)
    columns = {"label": "y", "sparse": ["c"], "timestamp": "t"}
    with pytest.raises(DataError, match=names(f"'t' {kind} date")):
        prepare_rows(tmp_path, source, columns, format="parquet", split=SplitConfig(kind="time"))
