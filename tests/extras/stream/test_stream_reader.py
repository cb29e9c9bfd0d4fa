"""Lines of a stream become the batches that prepared rows are, the same ones where a reader begins again or has ranks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.cli.command_line import load_config
from pipeline.config.data import DataConfig, ReaderConfig
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.data.dataset import load_dataset
from pipeline.data.read.endless import EndOfInputError, InputPausedError
from pipeline.data.read.quarantine import Quarantine
from pipeline.data.read.reader import ShardReader
from pipeline.data.targets import Target
from pipeline.extras.stream.encode import LineEncoder
from pipeline.extras.stream.journal import Journal
from pipeline.extras.stream.ranks import StreamRanks
from pipeline.extras.stream.reader import StreamReader
from pipeline.extras.stream.source import Lines
from pipeline.extras.stream.sources.folder import FolderSource
from pipeline.runtime.errors import RetrainingError
from pipeline.runtime.process.distributed import own_store
from tests.extras.stream.following import CRITEO, FAST, rows_of, until_the_end
from tests.support.messages import names
from tests.support.ranks import RankPool


@pytest.fixture(scope="module")
def clicks(prepared_clicks: str) -> tuple[DataConfig, list[bytes]]:
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines()
    return replace(CRITEO, path=prepared_clicks), lines


@pytest.fixture(scope="module")
def encoder(clicks: tuple[DataConfig, list[bytes]]) -> LineEncoder:
    data, _ = clicks
    return LineEncoder(data, load_dataset(data.path), FAST, [Target("label")], lambda features: features)


def test_lines_are_encoded_as_they_were_prepared(clicks: tuple[DataConfig, list[bytes]], encoder: LineEncoder) -> None:
    data, lines = clicks
    encoded = encoder.encode([Lines("a", 0, lines[:1200], list(range(1, 1201)))])
    reader = ShardReader(
        data.path,
        load_dataset(data.path),
        "train",
        global_batch_size=512,
        rank=0,
        world_size=1,
        config=ReaderConfig(shuffle="none", num_streams=1),
        seed=0,
    )
    batches = reader.batches(0)
    prepared = rows_of(next(batches))
    batches.close()
    found = iter(rows_of(encoded.batch))
    assert encoded.bad_rows == [] and all(row in found for row in prepared), "the training rows, in their order"


def test_a_bad_line_is_a_row_that_counts_nothing(clicks: tuple[DataConfig, list[bytes]], encoder: LineEncoder) -> None:
    _, lines = clicks
    whole = encoder.encode([Lines("a", 0, lines[:4], [1, 2, 3, 4])]).batch
    torn = encoder.encode([Lines("a", 0, [lines[0], b"1\tx", lines[1]], [1, 2, 3]), Lines("b", 0, lines[2:4], [1, 2])])
    assert [row.line for row in torn.bad_rows] == [2]
    assert torn.batch.is_present.tolist() == [True, False, True, True, True]
    kept = torn.batch.is_present
    assert torch.equal(torn.batch.dense_features[kept], whole.dense_features)
    assert torch.equal(torn.batch.sparse_features.values(), whole.sparse_features.values())
    assert torn.batch.sparse_features.lengths().view(-1, 5)[:, 1].sum() == 0
    nothing = encoder.nothing(3)
    assert not nothing.is_present.any() and nothing.sparse_features.keys() == whole.sparse_features.keys()


def test_events_have_an_age(clicks: tuple[DataConfig, list[bytes]], tmp_path: Path) -> None:
    data, lines = clicks
    header = ("label", *[f"int_{i}" for i in range(13)], *[f"cat_{i}" for i in range(26)], "at")
    columns = load_config(RetrainJob, ["experiment=quickstart", "source=x"]).data.columns
    data = replace(
        data,
        format="tsv",
        columns=replace(columns, label="label", dense=list(header[1:14]), sparse=list(header[14:40])),
    )
    for unit, texts in [
        ("s", ["100", "250"]),
        ("ms", ["100000", "250000"]),
        ("s", ["1970-01-01T00:01:40", "1970-01-01 00:04:10"]),
    ]:
        stream = replace(FAST, event_time_column="at", event_time_unit=unit)
        encoder = LineEncoder(data, load_dataset(data.path), stream, [Target("label")], lambda features: features)
        given = [line + b"\t" + text.encode() for line, text in zip(lines, texts, strict=False)]
        assert encoder.encode([Lines("a", 0, given, [1, 2], header)]).event_time == pytest.approx(250.0), texts


def _reader(folder: Path, run: Path, encoder: LineEncoder, pause_s: float | None = None) -> StreamReader:
    return StreamReader(
        FolderSource(str(folder), FAST, CRITEO),
        encoder,
        Journal(str(run / "journal.jsonl")),
        name=f"folder:{folder}",
        batch_size=50,
        stream=FAST,
        config=ReaderConfig(),
        quarantine=Quarantine(),
        pause_s=pause_s,
    )


def test_a_reader_pauses_once_for_the_batches_that_it_gave_and_reads_on(
    clicks: tuple[DataConfig, list[bytes]], encoder: LineEncoder, tmp_path: Path
) -> None:
    _, lines = clicks
    folder = tmp_path / "clicks"
    folder.mkdir()
    (folder / "a.tsv").write_bytes(b"".join(line + b"\n" for line in lines[:120]))
    reader = _reader(folder, tmp_path / "run", encoder, pause_s=0.001)
    first = until_the_end(reader.batches(0), InputPausedError)
    (folder / "b.tsv").write_bytes(b"".join(line + b"\n" for line in lines[120:200]))
    second = until_the_end(reader.batches(0, 2), InputPausedError)
    assert [len(first), len(second)] == [2, 2]
    with pytest.raises(EndOfInputError, match="idle_s") as ended:
        next(reader.batches(0, 4))
    assert not isinstance(ended.value, InputPausedError), "there is nothing to save"
    given = [row for batch in [*first, *second] for row in batch]
    assert given == rows_of(encoder.encode([Lines("all", 0, lines[:200], list(range(200)))]).batch)


def test_rows_of_a_task_are_added_by_the_number_of_the_batch(
    clicks: tuple[DataConfig, list[bytes]], tmp_path: Path
) -> None:
    """A resumed run reads batch 2 as number 2, so it gets the same additional rows."""
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "a.tsv").write_bytes(b"".join(line + b"\n" for line in clicks[1][:200]))
    numbers: list[tuple[int, int]] = []

    def extra_rows(features: KeyedJaggedTensor, epoch: int, batch: int) -> KeyedJaggedTensor:
        numbers.append((epoch, batch))
        return features

    data = clicks[0]
    adding = LineEncoder(data, load_dataset(data.path), FAST, [Target("label")], lambda ids: ids, extra_rows=extra_rows)
    reader = _reader(tmp_path / "clicks", tmp_path / "run", adding)
    until_the_end(reader.batches(0))
    place = reader.place(2)
    again = _reader(tmp_path / "clicks", tmp_path / "run", adding)
    again.go_to(2, place)
    until_the_end(again.batches(0, 2))
    assert numbers == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 2), (0, 3)]


def test_a_reader_that_begins_again_gives_the_batches_that_it_had_given(
    clicks: tuple[DataConfig, list[bytes]], encoder: LineEncoder, tmp_path: Path
) -> None:
    _, lines = clicks
    folder, run = tmp_path / "clicks", tmp_path / "run"
    folder.mkdir()

    def write(name: str, first: int, last: int) -> None:
        with open(folder / name, "ab") as file:
            file.write(b"".join(line + b"\n" for line in lines[first:last]))

    write("b.tsv", 0, 230)
    reader = _reader(folder, run, encoder)
    given = until_the_end(reader.batches(0))
    assert len(given) == 4 and reader.progress(1)["stream_batches_ahead"] == 3
    place = json.loads(json.dumps(reader.place(2)))
    assert place["batch"] == 2 and list(place["offsets"]) == ["b.tsv"]
    reader.close()
    write("a.tsv", 300, 400)  # now the first by its name
    write("b.tsv", 230, 260)
    again = _reader(folder, run, encoder)
    again.go_to(2, place)
    found = until_the_end(again.batches(0, 2))
    assert found[:2] == given[2:] and len(found) == 5, "two as they were, and 100 + 60 rows more"
    rows = [row for batch in [*given[:2], *found] for row in batch]
    expected = rows_of(
        encoder.encode([Lines("all", 0, lines[:200] + lines[300:400] + lines[200:250], list(range(350)))]).batch
    )
    assert rows == expected, "each row once"
    skipping = _reader(folder, run, encoder)
    skipping.go_to(2, place)
    assert until_the_end(skipping.batches(0, 4)) == found[2:], "a rollback leaves two batches out"
    other = _reader(tmp_path, run, encoder)
    with pytest.raises(RetrainingError, match=names("run_dir")):
        other.go_to(2, place)


def _read_on_ranks(rank: int, prepared: str, folder: str, run: str, place: Any) -> tuple[list[list[bytes]], Any, int]:
    """This rank's rows of each batch of 48 rows, where batch 2 begins, and how many more come after a rollback to it."""
    data, world_size = replace(CRITEO, path=prepared), dist.get_world_size()
    encoder = LineEncoder(data, load_dataset(data.path), FAST, [Target("label")], lambda features: features)
    reader = StreamReader(
        FolderSource(folder, FAST, CRITEO),
        encoder,
        Journal(f"{run}/journal.jsonl") if rank == 0 else None,
        name="clicks",
        batch_size=48 // world_size,
        stream=FAST,
        config=ReaderConfig(),
        quarantine=Quarantine(),
        ranks=StreamRanks(own_store("stream"), rank, world_size) if world_size > 1 else None,
    )
    if place is not None:
        reader.go_to(2, place)
        return until_the_end(reader.batches(0, 2)), None, 0
    dropped = reader.batches(0)
    next(dropped)
    dropped.close()  # a rollback: what was read ahead counts nothing
    found = until_the_end(reader.batches(0))
    place = reader.place(2)
    return found, place, len(until_the_end(reader.batches(0, 2)))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_ranks_train_on_the_batches_that_one_rank_would(
    ranks: RankPool, prepared_clicks: str, clicks: tuple[DataConfig, list[bytes]], tmp_path: Path, world_size: int
) -> None:
    _, lines = clicks
    folder, run = tmp_path / "clicks", tmp_path / "run"
    folder.mkdir()
    (folder / "a.tsv").write_bytes(b"".join(line + b"\n" for line in lines[:130]))
    (folder / "b.tsv").write_bytes(b"".join(line + b"\n" for line in lines[130:300]))
    whole, _, _ = ranks.run(1, _read_on_ranks, prepared_clicks, str(folder), str(tmp_path / "alone"), None)[0]
    found = ranks.run(world_size, _read_on_ranks, prepared_clicks, str(folder), str(run), None)
    assert len(whole) == 6 and all(len(own) == 6 and left == 4 for own, _, left in found)
    shares = zip(*(own for own, _, _ in found), strict=True)
    assert [list(itertools.chain(*each)) for each in shares] == whole
    place = json.loads(json.dumps(found[0][1]))
    (folder / "a0.tsv").write_bytes(b"".join(line + b"\n" for line in lines[300:400]))
    alone = ranks.run(1, _read_on_ranks, prepared_clicks, str(folder), str(run), place)[0][0]
    assert alone[:4] == whole[2:] and len(alone) == 6, "and one rank goes on from what several have read"
