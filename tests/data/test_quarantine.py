"""Bad rows by policy: left out with weight 0, listed once, the same at any world size; files that change are an error."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import Dataset
from pipeline.data.read.reader import ShardReader
from pipeline.data.read.shard_files import ShardError
from pipeline.runtime.errors import ConfigError, DataError
from tests.data.readers import PADDING, SPOILT, epoch_of, make_reader, rows_of, sample_of, samples_of
from tests.data.shard_files import write_dataset
from tests.support.messages import names

VALUES = [case for case in SPOILT if case not in ("missing column", "text for ids", "numbers for ids", "ids for lists")]
BAD = {3: "bucket", 17: "label", 40: "tags", 41: "int_0", 63: "last"}


def spoil_rows(table: pa.Table) -> pa.Table:
    """A value of each kind of column, at the rows of BAD."""
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    bad_values: dict[str, Any] = {"bucket": 50, "label": -1, "tags": [1, 2, -7], "int_0": float("nan"), "last": None}
    for row, name in BAD.items():
        columns[name][row] = bad_values[name]
    return pa.table({name: pa.array(values, table.schema.field(name).type) for name, values in columns.items()})


def quarantining(data: tuple[str, Dataset], rank: int = 0, world_size: int = 1, **changes: Any) -> ShardReader:
    return make_reader(data, rank, world_size, on_bad_rows="quarantine", **changes)


def entries_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("shuffle", ["row_groups", "none"])
def test_bad_rows_weigh_nothing_and_all_others_arrive_as_they_are(tmp_path: Path, shuffle: str) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[16, 16], [16, 16]], spoil_first_file_too)
    path = tmp_path / "run" / "train.rank0.jsonl"
    reader = quarantining(data, shuffle=shuffle, quarantine_path=str(path), multi_hot={"last": 2})
    samples = [sample for batch in epoch_of(reader) for sample in samples_of(batch)]
    assert len(samples) == 64
    assert samples.count(PADDING) == 5
    kept = {sample[1][0]: sample for sample in samples if sample != PADDING}
    assert sorted(kept) == sorted(set(range(64)) - {3, 5, 40, 41, 63})
    for row, sample in kept.items():
        assert (*sample[:4], *sample[5:]) == (*sample_of(row)[:4], *sample_of(row)[5:])  # all but the drawn bags
    found = {(e["file"], e["row"]): e["reason"] for e in entries_of(path)}
    assert sorted(found) == [
        ("train/part-0.parquet", 3),
        ("train/part-0.parquet", 5),
        ("train/part-1.parquet", 8),
        ("train/part-1.parquet", 9),
        ("train/part-1.parquet", 31),
    ]
    assert found["train/part-1.parquet", 8] == "'tags' is [1, 2, -7], not a list of ids within [0, 50)"
    assert found["train/part-0.parquet", 5] == "'label' is missing"


def spoil_first_file_too(table: pa.Table) -> pa.Table:
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    if columns["row"][0] == 0:
        columns["bucket"][3], columns["label"][5] = -1, None
    else:
        columns["tags"][8], columns["int_0"][9], columns["last"][31] = [1, 2, -7], float("inf"), 11
    return pa.table({name: pa.array(values, table.schema.field(name).type) for name, values in columns.items()})


def test_1_2_and_4_ranks_leave_out_the_same_rows_of_the_same_batches(tmp_path: Path) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[16] * 4], spoil_rows)

    def global_batches(world_size: int) -> list[list[tuple[Any, ...]]]:
        epochs = [epoch_of(quarantining(data, rank, world_size), 1) for rank in range(world_size)]
        return [[sample for batch in step for sample in samples_of(batch)] for step in zip(*epochs, strict=True)]

    alone = global_batches(1)
    assert sum(step.count(PADDING) for step in alone) == len(BAD)
    assert global_batches(2) == alone == global_batches(4)


@pytest.mark.parametrize("case", VALUES)
def test_every_kind_of_bad_value_is_quarantined_alone(tmp_path: Path, case: str) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[16, 16]], SPOILT[case][0])
    assert len(rows_of(epoch_of(quarantining(data)))) == 31


@pytest.mark.parametrize("damage", ["truncated", "no Parquet", "missing", "a column gone"])
def test_a_file_that_cannot_be_read_is_quarantined_whole_or_stops_by_policy(tmp_path: Path, damage: str) -> None:
    dataset = write_dataset(tmp_path, [[16, 16], [16, 16]])
    path = tmp_path / "train" / "part-1.parquet"
    if damage == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "no Parquet":
        path.write_bytes(b"x" * path.stat().st_size)
    elif damage == "missing":
        path.unlink()
    else:
        other = write_dataset(tmp_path / "other", [[16, 16], [16, 16]], lambda table: table.drop_columns(["last"]))
        shutil.copy(tmp_path / "other" / "train" / "part-1.parquet", path)
        dataset.splits["train"].files[1] = other.splits["train"].files[1]
    data = str(tmp_path), dataset
    with pytest.raises(DataError, match=names("part-1.parquet")):
        epoch_of(make_reader(data))
    lines = tmp_path / "q" / "train.rank0.jsonl"
    batches = epoch_of(quarantining(data, quarantine_path=str(lines)))
    assert sorted(rows_of(batches)) == list(range(32))
    assert sum(batch.batch_size for batch in batches) == 64
    assert [(e["file"], e["row"], e["num_rows"]) for e in sorted(entries_of(lines), key=lambda e: e["row"])] == [
        ("train/part-1.parquet", 0, 16),
        ("train/part-1.parquet", 16, 16),
    ]


def test_rows_are_listed_once_across_epochs_and_resumes(tmp_path: Path) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[16] * 4], spoil_rows)
    path = tmp_path / "q" / "train.rank0.jsonl"
    for _ in range(2):
        reader = quarantining(data, quarantine_path=str(path))
        for epoch in range(2):
            epoch_of(reader, epoch)
        with open(path, "a") as file:
            file.write('{"file": "cut of')  # a killed run's last line
    assert sum('"row"' in line for line in path.read_text().splitlines()) == len(BAD)


def test_a_file_that_changes_while_it_is_read_is_an_error_in_either_policy(tmp_path: Path) -> None:
    for policy in ("stop", "quarantine"):
        folder = tmp_path / policy
        data = str(folder), write_dataset(folder, [[16] * 4, [16] * 4])
        iterator = make_reader(data, shuffle="none", global_batch_size=4, on_bad_rows=policy).batches(0)
        next(iterator)
        other = write_dataset(tmp_path / "other", [[16] * 4, [16] * 4], lambda table: table)
        path = folder / "train" / "part-1.parquet"
        content = bytearray((tmp_path / "other" / other.splits["train"].files[1].path).read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match=names("part-1.parquet")):
            list(iterator)


def test_a_file_replaced_by_the_same_bytes_is_read_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[16] * 4, [16] * 4])
    iterator = make_reader(data, shuffle="none", global_batch_size=4).batches(0)
    next(iterator)
    path = tmp_path / "train" / "part-1.parquet"
    shutil.copy(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    assert len(list(iterator)) == 31
    assert "replaced while it was read, with the same content" in caplog.text


def test_a_file_that_vanishes_is_an_error(tmp_path: Path) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[16] * 4, [16] * 4])
    iterator = make_reader(data, shuffle="none", global_batch_size=4).batches(0)
    next(iterator)
    (tmp_path / "train" / "part-1.parquet").unlink()
    with pytest.raises(DataError, match=names("part-1.parquet")):
        list(iterator)


def test_checksums_are_verified_where_asked_and_ranks_share_the_work(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [[16, 16], [16, 16], [16, 16]])
    make_reader((str(tmp_path), dataset), verify="checksum")
    files = dataset.splits["train"].files
    files[1] = replace(files[1], sha256="0" * 64)
    make_reader((str(tmp_path), dataset), 0, 2, verify="checksum")
    with pytest.raises(ShardError, match=names("part-1.parquet dataset.json")):
        make_reader((str(tmp_path), dataset), 1, 2, verify="checksum")


@pytest.mark.parametrize("shuffle", ["row_groups", "none"])
def test_rows_of_a_batch_are_found_in_their_files(tmp_path: Path, shuffle: str) -> None:
    data = str(tmp_path), write_dataset(tmp_path, [[20, 1, 7], [16, 16]])
    for rank in range(2):
        reader = make_reader(data, rank, 2, shuffle=shuffle, drop_last=False)
        for epoch in range(2):
            for step, batch in enumerate(epoch_of(reader, epoch)):
                rows = [i for i in range(batch.batch_size) if batch.sample_weights[i] > 0]
                found = reader.locate(epoch, step, rows)
                firsts = {"train/part-0.parquet": 0, "train/part-1.parquet": 28}
                assert [firsts[file] + row for file, row in found] == rows_of([batch])


def test_wrong_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match=names("reader.on_bad_rows")):
        ReaderConfig(on_bad_rows="drop")
    with pytest.raises(ConfigError, match=names("reader.max_bad_fraction")):
        ReaderConfig(max_bad_fraction=1.5)
