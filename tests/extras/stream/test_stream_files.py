"""Parquet files that appear in a folder, and objects that appear below a prefix, are followed as growing text files are."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.data import DataConfig, ReaderConfig
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.read.quarantine import Quarantine
from pipeline.data.targets import Target
from pipeline.extras.stream.encode import LineEncoder
from pipeline.extras.stream.journal import Journal
from pipeline.extras.stream.reader import StreamReader
from pipeline.extras.stream.source import WHOLE, Lines, Offsets, Range, TableRows
from pipeline.extras.stream.sources.folder import FolderSource
from pipeline.runtime.errors import DataError
from pipeline.runtime.storage import storage
from tests.extras.stream.following import (
    CRITEO,
    FAST,
    copy_journal,
    follow_words,
    newest_step,
    rows_of,
    start_retrain,
    until_the_end,
    values_of,
    wait_until,
)
from tests.support.forks import WarmCommand
from tests.support.messages import names
from tests.support.object_store import BUCKET, FaultyProxy, environment, store  # noqa: F401

NAMES = ["label", *[f"int_{i}" for i in range(13)], *[f"cat_{i}" for i in range(26)]]


def _lines(prepared: str, count: int) -> list[bytes]:
    return (Path(prepared).parent / "clicks.tsv").read_bytes().splitlines()[:count]


def _table(lines: list[bytes], text: pa.DataType | None = None) -> pa.Table:
    cells = list(zip(*(line.decode().split("\t") for line in lines), strict=True))
    numbers = [pa.array([int(cell) if cell else None for cell in column], pa.int64()) for column in cells[:14]]
    texts = [pa.array([cell or None for cell in column], text or pa.string()) for column in cells[14:]]
    return pa.table([*numbers, *texts], names=NAMES)


def _data(prepared: str) -> DataConfig:
    columns = load_config(RetrainJob, ["experiment=quickstart", "source=x"]).data.columns
    named = replace(columns, label="label", dense=NAMES[1:14], sparse=NAMES[14:])
    return replace(CRITEO, path=prepared, format="parquet", columns=named)


def _read_all(source: FolderSource, offsets: Offsets, at_once: int = 1000) -> list[tuple[str, int, int, int]]:
    found = []
    while (rows := source.read(offsets, at_once)) is not None:
        assert isinstance(rows, TableRows)
        found.append((*rows.range, rows.num_rows))
        offsets[rows.partition] = rows.range.end
    return found


def test_parquet_files_are_read_by_rows_once_they_are_whole(prepared_clicks: str, tmp_path: Path) -> None:
    lines, data = _lines(prepared_clicks, 300), _data(prepared_clicks)
    pq.write_table(_table(lines[:100]), tmp_path / "b.parquet", row_group_size=40)
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(whole[: len(whole) // 2])
    pq.write_table(_table(lines[:1]).slice(0, 0), tmp_path / "empty.parquet")
    source, offsets = FolderSource(str(tmp_path), FAST, data), Offsets()
    assert _read_all(source, offsets, 30) == [
        ("b.parquet", 0, 30, 30),
        ("b.parquet", 30, 40, 10),
        ("b.parquet", 40, 70, 30),
        ("b.parquet", 70, 80, 10),
        ("b.parquet", 80, 100 + WHOLE, 20),
    ]
    assert offsets["empty.parquet"] == WHOLE and source.behind(offsets) == len(whole) // 2
    os.replace(_written(tmp_path, lines[100:150]), tmp_path / "a.parquet")
    (tmp_path / "c.parquet").write_bytes(whole)
    assert [each[0] for each in _read_all(source, offsets)] == ["a.parquet", *["c.parquet"] * 3]
    assert _read_all(source, offsets) == [] and source.behind(offsets) == 0
    again = source.reread(Range("b.parquet", 30, 100 + WHOLE))
    assert isinstance(again, TableRows) and again.is_last
    assert again.table.to_pylist() == _table(lines[30:100]).select(again.table.column_names).to_pylist()
    assert source.newest().keys() == offsets.keys() and _read_all(source, source.newest()) == []
    with pytest.raises(DataError, match=names("b.parquet 100 120")):
        source.reread(Range("b.parquet", 90, 120))
    with pytest.raises(DataError, match=names("none.parquet")):
        source.reread(Range("none.parquet", 0, 1))
    pq.write_table(_table(lines[:9]).drop(["cat_3"]), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=names("cat_3 d.parquet")):
        source.read(offsets, 5)


def _written(folder: Path, lines: list[bytes]) -> Path:
    pq.write_table(_table(lines), folder / "new.tmp")
    return folder / "new.tmp"


def test_rows_of_parquet_are_encoded_as_their_lines(prepared_clicks: str) -> None:
    lines, dataset = _lines(prepared_clicks, 60), load_dataset(prepared_clicks)
    encoders = [
        LineEncoder(data, dataset, FAST, [Target("label")], lambda features: features)
        for data in (replace(CRITEO, path=prepared_clicks), _data(prepared_clicks))
    ]
    text = encoders[0].encode([Lines("a", 0, lines, list(range(1, 61)))])
    parts = [
        TableRows("a", 0, _table(lines[:20])),
        TableRows("b", 0, _table(lines[20:30])),
        TableRows("c", 5, _table(lines[30:45], pa.dictionary(pa.int32(), pa.string()))),
        TableRows("d", 5, _table(lines[45:], pa.large_string())),
    ]
    typed = encoders[1].encode(parts)
    assert rows_of(typed.batch) == rows_of(text.batch) and typed.bad_rows == []
    bad = _table(lines[:3]).set_column(0, "label", pa.array([0, 7, 1]))
    torn = encoders[1].encode([TableRows("a", 0, _table(lines[:2])), TableRows("a", 2, bad)])
    assert [row.line for row in torn.bad_rows] == [4]
    assert torn.batch.is_present.tolist() == [True, True, True, False, True]


def _reader(folder: str, run: Path, data: DataConfig) -> StreamReader:
    encoder = LineEncoder(data, load_dataset(data.path), FAST, [Target("label")], lambda features: features)
    return StreamReader(
        FolderSource(folder, FAST, data),
        encoder,
        Journal(str(run / "journal.jsonl")),
        name="clicks",
        batch_size=50,
        stream=FAST,
        config=ReaderConfig(),
        quarantine=Quarantine(),
    )


def _assert_each_row_is_read_once(
    folder: str, run: Path, data: DataConfig, write: Callable[[str, list[bytes]], None]
) -> None:
    """A reader that begins again after files have come gives the batches that it had given, and each row once."""
    lines = _lines(data.path, 330)
    write("b", lines[:130])
    write("c", lines[130:230])
    reader = _reader(folder, run, data)
    given = until_the_end(reader.batches(0))
    place = json.loads(json.dumps(reader.place(2)))
    reader.close()
    write("a", lines[230:330])
    again = _reader(folder, run, data)
    again.go_to(2, place)
    found = until_the_end(again.batches(0, 2))
    assert len(given) == 4 and found[:2] == given[2:] and len(found) == 4
    encoder = LineEncoder(
        replace(CRITEO, path=data.path), load_dataset(data.path), FAST, [Target("label")], lambda features: features
    )
    order = lines[:200] + lines[230:330]
    expected = rows_of(encoder.encode([Lines("all", 0, order, list(range(len(order))))]).batch)
    assert [row for batch in [*given[:2], *found] for row in batch] == expected


def test_rows_of_parquet_files_are_read_once(prepared_clicks: str, tmp_path: Path) -> None:
    folder, run = tmp_path / "clicks", tmp_path / "run"
    folder.mkdir()
    run.mkdir()

    def write(name: str, lines: list[bytes]) -> None:
        pq.write_table(_table(lines), folder / f"{name}.parquet", row_group_size=37)

    _assert_each_row_is_read_once(str(folder), run, _data(prepared_clicks), write)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["parquet", "criteo_tsv"])
def test_objects_below_a_prefix_are_read_once(
    store: FaultyProxy,  # noqa: F811
    prepared_clicks: str,
    tmp_path: Path,
    kind: str,
) -> None:
    """The last line of an object needs no end. Every tenth request of the store fails at first."""
    folder = f"s3://{BUCKET}/clicks/today"
    asked: list[str] = []

    def fault(method: str, path: str) -> str:
        asked.append(path)
        return "503" if method == "GET" and len(asked) % 10 == 0 else ""

    store.faults = fault

    def write(name: str, lines: list[bytes]) -> None:
        path = tmp_path / name
        if kind == "parquet":
            pq.write_table(_table(lines), path, row_group_size=37)
        else:
            path.write_bytes(b"\n".join(lines))
        storage.upload_file(str(path), f"{folder}/hour=1/{name}.{kind}")

    data = _data(prepared_clicks) if kind == "parquet" else replace(CRITEO, path=prepared_clicks)
    (tmp_path / "run").mkdir()
    _assert_each_row_is_read_once(folder, tmp_path / "run", data, write)
    assert store.counts.get("503")


@pytest.mark.campaign
def test_a_training_that_follows_objects_and_is_killed_goes_on_to_the_bits_of_one_that_was_not(
    store: FaultyProxy,  # noqa: F811
    prepared_clicks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment(store.url).items():
        monkeypatch.setenv(name, value)
    lines, folder = _lines(prepared_clicks, 4050), f"s3://{BUCKET}/clicks"

    def write(name: str, first: int, last: int) -> None:
        pq.write_table(_table(lines[first:last]), tmp_path / "staged", row_group_size=300)
        storage.upload_file(str(tmp_path / "staged"), f"{folder}/{name}.parquet")

    def command(run: Path, *more: str) -> WarmCommand:
        columns = ["label=label", f"dense=[{','.join(NAMES[1:14])}]", f"sparse=[{','.join(NAMES[14:])}]"]
        typed = ["data.format=parquet", "data.synthetic=null", *(f"data.columns.{each}" for each in columns)]
        words = follow_words(prepared_clicks, Path("x"), run, *typed, *more)
        return start_retrain([*words, f"source={folder}"])

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    write("b", 0, 2500)
    process = command(killed)
    try:
        wait_until(lambda: newest_step(killed) >= 14, process)
        write("a", 2500, 4050)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
    assert command(killed, "stream.idle_s=2").wait(200) == 0
    assert newest_step(killed) == 40
    journal = copy_journal(killed, whole)
    assert command(whole, "stream.idle_s=2").wait(200) == 0
    ours, theirs = (values_of(each, 40) for each in (killed, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (
        sum(end % WHOLE - begin for entry in map(json.loads, journal.splitlines()) for _, begin, end in entry["ranges"])
        == 4000
    )
