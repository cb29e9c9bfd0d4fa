"""A source that changes while `prepare` reads it is refused by name, or the data set holds one of its states."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import DataConfig
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare import executor
from pipeline.data.prepare import prepare as prepare_module
from pipeline.data.prepare.run import prepare
from pipeline.data.raw import source as source_module
from pipeline.data.raw.source import SourceChangedError
from pipeline.runtime.errors import DataError
from tests.data.sources import COLUMNS, TRAIN_ALONE, prepare_rows
from tests.data.test_executors import digests, small_blocks  # noqa: F401
from tests.support.messages import names

ROWS = 400
HOUR_AGO = 1_700_000_000


def lines_of(num_rows: int, first: int = 0) -> bytes:
    rows = range(first, first + num_rows)
    return "".join(f"{row * row % 7 % 2},{row % 11}.5,c{row % 13},m{row % 5}|m{row % 3}\n" for row in rows).encode()


def write_sources(folder: Path) -> Path:
    """Two files of an hour ago; the changes below are made to the second one."""
    folder.mkdir()
    for number in range(2):
        path = folder / f"day_{number}.csv"
        path.write_bytes(b"y,x,c,m\n" + lines_of(ROWS, number * ROWS))
        os.utime(path, (HOUR_AGO, HOUR_AGO))
    return folder


def _append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(lines_of(50, 9_000))


def _append_half_a_row(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"1,2.5,c1")


def _truncate(path: Path) -> None:
    os.truncate(path, path.read_bytes().index(b"\n", path.stat().st_size // 2) + 1)


def _truncate_in_a_row(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 3)


def _flipped(content: bytes) -> bytes:
    flips = bytes.maketrans(b"01", b"10")
    return b"\n".join(line[:1].translate(flips) + line[1:] for line in content.split(b"\n"))


def _flip_labels(path: Path) -> None:
    content = path.read_bytes()
    with open(path, "r+b") as file:
        begin = content.index(b"\n", len(content) // 2)
        file.seek(begin)
        file.write(_flipped(content[begin:]))


def _replace(path: Path) -> None:
    """By a file of the same size and time."""
    other = path.with_name("_other")
    other.write_bytes(_flipped(path.read_bytes()))
    shutil.copystat(path, other)
    os.replace(other, path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "rows appended": _append,
    "half a row appended": _append_half_a_row,
    "truncated": _truncate,
    "truncated in a row": _truncate_in_a_row,
    "labels flipped": _flip_labels,
    "replaced": _replace,
    "removed": lambda path: path.unlink(),
}


STEPS: list[tuple[Any, str]] = [
    (source_module.TextReader, "_read"),
    (executor, "run_task"),
    (prepare_module, "check_sources"),
    (prepare_module, "assemble_dataset"),
    (prepare_module, "check_unchanged"),
]


class Moments:
    """Counts calls of the functions `steps`, and calls `change` before call number `at`."""

    def __init__(
        self, patch: pytest.MonkeyPatch, at: int, change: Callable[[], object], steps: list[tuple[Any, str]] = STEPS
    ) -> None:
        self.count, self._at, self._change = 0, at, change
        for owner, name in steps:
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.tick()
            return function(*args, **named)

        return call

    def tick(self) -> None:
        if self.count == self._at:
            self._change()
        self.count += 1


def shards_of(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in digests(folder).items() if name.endswith(".parquet")}


def job_of(sources: Path, path: Path) -> PrepareJob:
    columns = ColumnsConfig(**COLUMNS)  # type: ignore[arg-type]
    return PrepareJob(
        DataConfig(name="rows", path=str(path), format="csv", columns=columns, max_quarantined_fraction=0.1),
        source=str(sources),
        threads=1,
    )


def states_of(tmp_path: Path, change: str) -> list[dict[str, str]]:
    """The shards of a preparation before, and of one after the change."""
    sources = write_sources(tmp_path / "states")
    states = []
    for name in ("before", "after"):
        prepare(job_of(sources, tmp_path / name))
        states.append(shards_of(tmp_path / name))
        CHANGES[change](sources / "day_1.csv")
    return states


def check_moment(tmp_path: Path, change: str, share: float, states: list[dict[str, str]]) -> bool:
    """Change the source at a `share` of the moments of a preparation; returns whether it was refused."""
    with pytest.MonkeyPatch.context() as patch:
        moments = Moments(patch, -1, lambda: None)
        prepare(job_of(write_sources(tmp_path / "counted"), tmp_path / "count"))
    sources = write_sources(tmp_path / "raw")
    with pytest.MonkeyPatch.context() as patch:
        Moments(patch, round(share * (moments.count - 1)), lambda: CHANGES[change](sources / "day_1.csv"))
        try:
            prepare(job_of(sources, tmp_path / "ds"))
        except SourceChangedError as error:
            assert "day_1.csv" in str(error) and "run the same command again" in str(error)
            assert not (tmp_path / "ds" / "dataset.json").exists()
            return True
    assert shards_of(tmp_path / "ds") in states
    return False


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("share", [0.45, 1.0])
@pytest.mark.parametrize("change", ["half a row appended", "labels flipped", "replaced"])
def test_a_source_that_changes_while_it_is_read_is_refused_by_name(tmp_path: Path, change: str, share: float) -> None:
    assert check_moment(tmp_path, change, share, [])


@pytest.mark.campaign
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_at_sixty_moments_is_refused_or_read_in_one_state(tmp_path: Path, change: str) -> None:
    states = states_of(tmp_path, change) if change != "removed" else []
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_moment(folder, change, number / 59, states)


@pytest.mark.usefixtures("small_blocks")
def test_rows_that_were_staged_before_a_kill_are_read_again_if_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a large file is one of samples; here it is made blind to show that the stamp decides."""
    monkeypatch.setattr(source_module, "digest_of_samples", lambda file, size: "same")
    sources = write_sources(tmp_path / "raw")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_divide", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(job_of(sources, tmp_path / "ds"))
    assert list((tmp_path / "ds.staging").glob("*/done.json"))
    _flip_labels(sources / "day_1.csv")
    prepare(job_of(sources, tmp_path / "ds"))
    prepare(job_of(sources, tmp_path / "anew"))
    assert shards_of(tmp_path / "ds") == shards_of(tmp_path / "anew")


def test_a_last_row_without_a_line_end_is_read_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("y,x,c,m\n1,0.5,a,m\n0,1.5,b,m")
    assert prepare_rows(tmp_path, path).dataset.accepted_rows == 2
    assert "1 of 1 source files end without a line end" in caplog.text and "rows.csv (row 2)" in caplog.text


def test_half_of_a_last_row_is_quarantined_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("y,x,c,m\n1,0.5,a,m\n0,1.5,b,m\n0,2.")
    assert prepare_rows(tmp_path, path, max_quarantined_fraction=0.5).dataset.quarantined_rows == 1
    assert "2 columns, not 4; the file ends within this line" in (tmp_path / "data" / "quarantine.jsonl").read_text()


def test_a_changed_source_says_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("y,x,c,m\n1,0.5,a,m\n")
    (listed,) = source_module.find_sources(str(path))
    _append(path)
    with pytest.raises(SourceChangedError, match=names(f"rows.csv 18 bytes {path.stat().st_size:,} modified")):
        source_module.check_unchanged([listed])


def _large_source(folder: Path) -> tuple[Path, int]:
    """A file of 5 MB, and the place of a label between two of the 64 samples."""
    path = folder / "rows.csv"
    path.write_bytes(b"y,x,c,m\n" + b"".join(b"%d,%d.5,c%d,m\n" % (row % 2, row, row % 13) for row in range(350_000)))
    content = path.read_bytes()
    size = len(content)
    begins = [(size - source_module.SAMPLE_BYTES) * i // 63 for i in range(64)]
    at = begins[30] + source_module.SAMPLE_BYTES
    assert size > source_module.SAMPLE_BYTES * 64 and at + 200 < begins[31]
    return path, content.index(b"\n", at) + 1


def _flip_label(path: Path, at: int, modified: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        label = file.read(1)
        file.seek(at)
        file.write(b"1" if label == b"0" else b"0")
    os.utime(path, (modified, modified))


def test_a_changed_byte_between_the_samples_of_a_prepared_source_is_found(tmp_path: Path) -> None:
    """`prepare` said that the data set was complete."""
    path, at = _large_source(tmp_path)
    os.utime(path, (HOUR_AGO, HOUR_AGO))
    assert not prepare_rows(tmp_path, path).already_prepared
    os.utime(path)  # written to, with the same bytes
    assert prepare_rows(tmp_path, path).already_prepared
    _flip_label(path, at, time.time_ns() // 10**9 + 60)
    with pytest.raises(DataError, match=names("rows.csv data.path")):
        prepare_rows(tmp_path, path)
    os.utime(path, (HOUR_AGO, HOUR_AGO))  # as a copy that keeps an older time
    job = PrepareJob(DataConfig(name="rows", path=str(tmp_path / "data"), format="csv", columns=ColumnsConfig(**COLUMNS), split=TRAIN_ALONE), str(path), verify_sources=True)  # type: ignore[arg-type]  # fmt: skip
    with pytest.raises(DataError, match=names("rows.csv data.path")):
        prepare(job)
    _flip_label(path, at, HOUR_AGO)
    assert prepare(job).already_prepared
    described = tmp_path / "data" / "dataset.json"
    written = json.loads(described.read_text())
    assert len(written["sources"][0].pop("sha256")) == 64
    described.write_text(json.dumps(written))
    with pytest.raises(DataError, match=names("dataset.json SHA-256 rows.csv")):
        prepare(job)
