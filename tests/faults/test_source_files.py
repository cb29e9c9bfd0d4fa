"""Faults 16 and 19 in prepare: drifting schemas, broken and empty files, a disk that is full. Every end is one clear line."""

from __future__ import annotations

import gzip
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.config.columns import ColumnsConfig
from pipeline.config.data import SplitConfig
from tests.data.criteo_rows import random_lines, read_split, run_prepare, write_lines
from tests.faults.conftest import FaultRecorder
from tests.support.examples import SEED
from tests.support.messages import mentions, names

COLUMNS = ColumnsConfig(label="y", dense=["x"], sparse=["a", "b"])
SETTINGS: dict[str, Any] = {
    "columns": COLUMNS,
    "dense_transform": "none",
    "split": SplitConfig(validation_fraction=0.0, test_fraction=0.0),
}
ROWS = 40


def table(**changes: Any) -> pa.Table:
    columns = {"y": [0, 1] * 20, "x": [float(i) for i in range(ROWS)], "a": list(range(ROWS)), "b": ["u", "v"] * 20}
    return pa.table({**columns, **changes})


def write_files(folder: Path, form: str, *tables: pa.Table) -> str:
    folder.mkdir(parents=True)
    for number, each in enumerate(tables):
        path = folder / f"day_{number}.{form}"
        if form == "parquet":
            pq.write_table(each, path)
        else:
            pa.csv.write_csv(each, path)
    return str(folder)


DRIFTS: dict[str, tuple[pa.Table, str]] = {
    "missing column": (table().drop_columns(["a"]), "day_1 'a'"),
    "renamed column": (table().rename_columns(["y", "x", "aa", "b"]), "'a' 'aa'"),
    "a column twice": (pa.table([table()[i] for i in (0, 1, 2, 3, 3)], names=["y", "x", "a", "b", "b"]), "'b'"),
}
PARQUET_DRIFTS: dict[str, tuple[pa.Table, str]] = {
    "ids become structs": (table(a=[{"v": i} for i in range(ROWS)]), "'a' struct"),
    "numbers become structs": (table(x=[{"v": i} for i in range(ROWS)]), "'x' struct"),
}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_drifting_schema_is_an_error_before_rows_are_read_and_other_orders_are_none(
    tmp_path: Path, form: str, fault: FaultRecorder
) -> None:
    cases = DRIFTS | (PARQUET_DRIFTS if form == "parquet" else {})
    for name, (drifted, message) in cases.items():
        source = write_files(tmp_path / name, form, table(), drifted)
        with pytest.raises(ValueError, match=names(message)):
            run_prepare(source, tmp_path / name / "ds", format=form, **SETTINGS)
    reordered = table(extra=["?"] * ROWS).select(["extra", "b", "a", "x", "y"])
    source = write_files(tmp_path / "reordered", form, table(), reordered)
    dataset = run_prepare(source, tmp_path / "ds", format=form, **SETTINGS)
    rows = read_split(tmp_path / "ds", dataset, "train")
    assert rows.slice(0, ROWS) == rows.slice(ROWS)
    fault(
        16,
        f"{form}: {len(cases)} drifts refused by name before rows are read; reordered and extra columns read by "
        "name, rows equal",
        count=len(cases) + 1,
    )


@pytest.mark.parametrize("kind", [str, float])
def test_whole_numbers_are_the_same_category_as_text_and_as_fractions(
    tmp_path: Path, kind: Callable[[int], object]
) -> None:
    source = write_files(tmp_path / "days", "parquet", table(), table(a=[kind(i) for i in range(ROWS)]))
    assert run_prepare(source, tmp_path / "ds", format="parquet", **SETTINGS).sparse_feature("a").num_distinct == ROWS


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated Parquet": ("parquet", _truncate, "day_1.parquet"),
    "no Parquet": ("parquet", lambda path: path.write_text("y,x,a,b\n1,2,3,4\n"), "day_1.parquet"),
    "empty Parquet": ("parquet", lambda path: path.write_bytes(b""), "day_1.parquet"),
    "Parquet amid CSV": ("csv", lambda path: pq.write_table(table(), path), "day_1.csv"),
    "truncated gzip": ("csv.gz", _truncate, "day_1.csv.gz"),
    "spoilt gzip": ("csv.gz", lambda path: path.write_bytes(path.read_bytes()[:30] + b"\xff" * 60), "gzip"),
    "no gzip": ("csv.gz", lambda path: path.write_text("y,x,a,b\n"), "gzip"),
}


def test_broken_files_are_named(tmp_path: Path, fault: FaultRecorder) -> None:
    for name, (form, spoil, message) in BROKEN.items():
        folder = tmp_path / name
        source = write_files(folder, form.removesuffix(".gz"), *[table()] * 2)
        if form.endswith(".gz"):
            for path in folder.glob("*.csv"):
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
                path.unlink()
        spoil(folder / f"day_1.{form}")
        with pytest.raises(ValueError, match=names(message)):
            run_prepare(source, tmp_path / "ds" / name, format=form.removesuffix(".gz"), **SETTINGS)
        assert not (tmp_path / "ds" / name / "dataset.json").exists()
    fault(19, f"{len(BROKEN)} kinds of broken source files: each named, no data set left behind", count=len(BROKEN))


@pytest.mark.long
def test_flipped_bytes_of_a_parquet_source_end_in_a_named_error_or_sound_rows(
    tmp_path: Path, fault: FaultRecorder
) -> None:
    """Writers rarely leave page checksums, so a flip among the values is another value: no crash is all there is."""
    draw, named = random.Random(3 + SEED), 0
    source = Path(write_files(tmp_path / "days", "parquet", table())) / "day_0.parquet"
    sound = source.read_bytes()
    for number in range(60):
        content = bytearray(sound)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        source.write_bytes(content)
        try:
            dataset = run_prepare(
                str(source), tmp_path / f"ds{number}", format="parquet", max_quarantined_fraction=1.0, **SETTINGS
            )
            assert dataset.accepted_rows + dataset.quarantined_rows == dataset.source_rows
        except ValueError:
            named += 1
    fault(19, f"60 bit flips in a Parquet source: {named} named errors, 0 crashes", count=60, seed=3 + SEED)


def test_empty_files_among_others_add_nothing_and_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lines(tmp_path / "days" / "day_0", random_lines(30))
    write_lines(tmp_path / "days" / "day_1", [])
    (tmp_path / "days" / "_SUCCESS").write_bytes(b"")
    assert run_prepare(str(tmp_path / "days"), tmp_path / "ds").accepted_rows == 30
    assert mentions(caplog.text, "day_1") and "_SUCCESS" not in caplog.text


def _prepare_command(source: object, path: str) -> list[str]:
    return [sys.executable, "-m", "pipeline", "prepare", "data=criteo_kaggle", f"source={source}", f"data.path={path}"]


def _limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


@pytest.mark.long
def test_a_full_disk_ends_in_one_line_and_a_second_run_finishes(tmp_path: Path, fault: FaultRecorder) -> None:
    source = write_lines(tmp_path / "train.txt", random_lines(20_000))
    command = _prepare_command(source, f"{tmp_path}/ds")
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=_limit_file_size, timeout=300)
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and str(tmp_path / "ds") in last and "Traceback" not in ended.stderr
    assert not (tmp_path / "ds" / "dataset.json").exists() and not (tmp_path / "ds.staging").exists()
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0
    fault(
        19,
        "a limit on file sizes while preparing: one line with the path, no data set; run again, it finishes",
        count=1,
    )


@pytest.mark.long
def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "train.txt", random_lines(50))
    command = _prepare_command(source, f"{source}/ds")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ") and f"{source}/ds" in ended.stderr
