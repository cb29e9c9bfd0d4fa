"""Windows come oldest first; one that is not whole holds up the others until its deadline."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.retraining import WindowsConfig
from pipeline.data.raw.source import SourceChangedError
from pipeline.retraining.growing_files import GrowingFiles
from pipeline.retraining.windows import LATE, READY, WAITING, Window, extract_rows, find_windows
from pipeline.runtime.errors import RetrainingError
from tests.support.messages import mentions, names

CRITEO = DataConfig(name="clicks")
CSV = DataConfig(name="clicks", format="csv", columns=ColumnsConfig(label="click", dense=["x"], sparse=["a"]))
NOON = datetime(2026, 11, 4, 12, tzinfo=UTC)


def _partition(source: Path, name: str, rows: int = 3, whole: bool = True) -> None:
    folder = source / name
    folder.mkdir(parents=True)
    (folder / "rows.tsv").write_text("1\t2\n" * rows)
    if whole:
        (folder / "_SUCCESS").touch()


def _states(config: WindowsConfig, source: Path, now: datetime = NOON, done: tuple[str, ...] = ()) -> dict[str, str]:
    return {one.name: one.state for one in find_windows(config, str(source), CRITEO, now, None, done)}


def test_partitions_are_windows_in_order_and_done_ones_are_left_out(tmp_path: Path) -> None:
    for name in ("dt=2026-11-10", "dt=2026-11-09", "notes", "dt=2026-11-08"):
        _partition(tmp_path, name)
    found = find_windows(WindowsConfig(), str(tmp_path), CRITEO, NOON, None, ["dt=2026-11-08"])
    assert [one.name for one in found] == ["dt=2026-11-09", "dt=2026-11-10"]
    assert found[0].begin == datetime(2026, 11, 9, tzinfo=UTC) and found[0].source == f"{tmp_path}/dt=2026-11-09"


def test_nested_partitions_are_windows_of_an_hour(tmp_path: Path) -> None:
    for hour in ("03", "04"):
        _partition(tmp_path, f"dt=2026-11-04/hour={hour}")
    config = WindowsConfig(pattern="dt=%Y-%m-%d/hour=%H", length_hours=1)
    assert list(_states(config, tmp_path)) == ["dt=2026-11-04/hour=03", "dt=2026-11-04/hour=04"]


def test_a_window_without_its_marker_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    _partition(tmp_path, "dt=2026-11-02", whole=False)
    _partition(tmp_path, "dt=2026-11-03")
    config = WindowsConfig(lateness_hours=24)
    day = "dt=2026-11-02"
    assert _states(config, tmp_path, datetime(2026, 11, 3, 23, tzinfo=UTC))[day] == WAITING
    assert _states(config, tmp_path, datetime(2026, 11, 4, 1, tzinfo=UTC))[day] == LATE
    late = WindowsConfig(lateness_hours=24, late="use")
    assert _states(late, tmp_path, datetime(2026, 11, 4, 1, tzinfo=UTC))[day] == READY


def test_a_window_with_too_few_rows_is_waited_for(tmp_path: Path) -> None:
    _partition(tmp_path, "dt=2026-11-04", rows=3)
    (window,) = find_windows(WindowsConfig(min_rows=4), str(tmp_path), CRITEO, NOON, None, ())
    assert (window.state, window.why.split(";")[0]) == (WAITING, "3 of at least 4 rows")
    assert _states(WindowsConfig(min_rows=3), tmp_path) == {"dt=2026-11-04": READY}


def test_a_missing_window_is_waited_for_and_not_with_lateness_0(tmp_path: Path) -> None:
    _partition(tmp_path, "dt=2026-11-02")
    _partition(tmp_path, "dt=2026-11-04")
    assert _states(WindowsConfig(lateness_hours=24), tmp_path)["dt=2026-11-03"] == WAITING
    assert _states(WindowsConfig(lateness_hours=6), tmp_path)["dt=2026-11-03"] == LATE
    assert list(_states(WindowsConfig(lateness_hours=0), tmp_path)) == ["dt=2026-11-02", "dt=2026-11-04"]


def test_a_source_without_windows_says_what_it_has(tmp_path: Path) -> None:
    _partition(tmp_path, "day=3")
    with pytest.raises(RetrainingError, match=names("windows.pattern=dt=%Y-%m-%d day=3")):
        _states(WindowsConfig(), tmp_path)
    with pytest.raises(RetrainingError, match="nothing"):  # a wrong source is no source without news
        _states(WindowsConfig(first="2026-11-01"), tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "times",
    [
        ["1762214400", "1762217999", "1762218000", "1762221600"],
        ["2025-11-04 00:00:00", "2025-11-04T00:59:59", "2025-11-04 01:00:00", "2025-11-04 02:00:00"],
    ],
)
def test_a_growing_file_is_cut_by_its_timestamps(tmp_path: Path, times: list[str]) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("click,x,a,time\n" + "".join(f'{i % 2},0{i},"v,{i}",{time}\n' for i, time in enumerate(times)))
    config = WindowsConfig(kind="timestamps", timestamp_column="time", length_hours=1)
    found = find_windows(config, str(source), CSV, datetime(2025, 11, 4, 2, tzinfo=UTC), None, ())
    assert [(one.name, one.state) for one in found] == [
        ("2025-11-04T00:00", READY),
        ("2025-11-04T01:00", READY),
        ("2025-11-04T02:00", WAITING),
    ]
    path = extract_rows(found[0], config, CSV, str(tmp_path / "work"))
    lines = Path(path).read_text().splitlines()
    assert len(lines) == 3 and "00" in lines[1] and "v,1" in lines[2]  # text stays as it was written
    source.write_text("")
    assert extract_rows(found[0], config, CSV, str(tmp_path / "work")) == path  # begun: it stays what it was


def test_half_of_a_row_that_is_still_written_is_left_for_later(tmp_path: Path) -> None:
    """Half of a time, 17622, was a time of 1970, and so the oldest window."""
    source = tmp_path / "[a] rows*.csv"
    whole = "click,x,a,time\n1,0,v,1762214400\n0,1,v,1762218000\n"
    source.write_text(whole + "0,1,v,17622")
    config = WindowsConfig(kind="timestamps", timestamp_column="time", length_hours=1)
    now = datetime(2025, 11, 4, 2, tzinfo=UTC)
    found = find_windows(config, str(source), CSV, now, None, ())
    assert [one.name for one in found] == ["2025-11-04T00:00", "2025-11-04T01:00"]
    path = extract_rows(found[1], config, CSV, str(tmp_path / "work"))
    assert Path(path).read_text().splitlines() == ["click,x,a,time", "0,1,v,1762218000"]
    source.write_text("click,x,a,time")
    with pytest.raises(RetrainingError, match=names("rows*.csv line")):
        find_windows(config, str(source), CSV, now, None, ())


def test_a_growing_source_may_only_grow_while_it_is_read(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("a\n1\n2\n")
    growing = GrowingFiles([str(source)])
    with open(source, "a") as file:
        file.write("3\n")
    growing.check()
    for content in ("a\n1\n", "a\n1\n4\n3\n"):
        source.write_text(content)
        with pytest.raises(SourceChangedError, match=names("rows.csv bytes grow")):
            growing.check()


def test_the_last_hour_of_a_source_that_pauses_is_not_lost(tmp_path: Path) -> None:
    """It was skipped where no later row came in time: each of them, of a source that brings an hour's rows after it."""
    source, hour = tmp_path / "rows.csv", 1762214400
    source.write_text(f"click,x,a,time\n1,0,v,{hour}\n1,0,v,{hour + 3600}\n1,0,v,{hour + 3601}\n")
    now = datetime(2025, 11, 4, 8, tzinfo=UTC)

    def last(**words: float) -> str:
        config = WindowsConfig(kind="timestamps", timestamp_column="time", length_hours=1, **words)
        return find_windows(config, str(source), CSV, now, None, ())[-1].state

    assert (last(lateness_hours=24), last(lateness_hours=6), last(lateness_hours=0)) == (WAITING, READY, WAITING)
    assert (last(lateness_hours=6, min_rows=2), last(lateness_hours=6, min_rows=3)) == (READY, LATE)


def test_times_that_are_no_date_up_to_now_make_and_end_no_window(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Among rows of the hour that is still open: one in milliseconds, one that is to come, and what is no time at all."""
    source, hour = tmp_path / "rows.csv", 1762214400
    config = WindowsConfig(kind="timestamps", timestamp_column="time", length_hours=1)
    now = datetime(2025, 11, 4, 1, 30, tzinfo=UTC)

    def found(*times: object) -> list[tuple[str, str]]:
        source.write_text("click,x,a,time\n" + "".join(f"1,0,v,{time}\n" for time in times))
        return [(one.name, one.state) for one in find_windows(config, str(source), CSV, now, None, ())]

    strays = (hour * 1000, hour + 10**8, -(10**15), 10**18, "infinity", "-infinity", "never", "")
    expected = [("2025-11-04T00:00", READY), ("2025-11-04T01:00", WAITING)]
    with caplog.at_level("WARNING"):
        assert found(hour, hour + 3600, *strays) == expected
    assert mentions(caplog.text, "4 rows rows.csv =time 1970")
    with pytest.raises(RetrainingError, match=names("2 rows windows.timestamp_unit=s =time clock")):
        found(hour * 1000, (hour + 3600) * 1000)


def test_a_window_is_named_as_a_folder() -> None:
    from pipeline.retraining.windows import file_name

    window = Window("dt=2026-11-04/hour=03", NOON, NOON, "")
    assert file_name(window.name) == "dt=2026-11-04__hour=03"
