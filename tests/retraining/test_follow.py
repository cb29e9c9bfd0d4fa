"""A training follows files that are added and grow, and each row is trained on once: also where it is killed and goes on."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.steps import list_steps, step_path
from pipeline.cli.command_line import load_config
from pipeline.config.data import DataConfig
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.reader import ReaderConfig
from pipeline.config.stream import StreamConfig
from pipeline.data.dataset import load_dataset
from pipeline.data.read.batch import Batch
from pipeline.data.read.endless import EndOfInputError
from pipeline.data.read.quarantine import Quarantine
from pipeline.data.read.reader import ShardReader
from pipeline.data.stream.journal import Journal
from pipeline.data.stream.source import Lines, Range
from pipeline.data.stream.sources.folder import FolderSource
from pipeline.data.targets import Target
from pipeline.retraining.follow.encode import LineEncoder
from pipeline.retraining.follow.ranks import StreamRanks
from pipeline.retraining.follow.reader import StreamReader
from pipeline.runtime.errors import ConfigError, DataError, RetrainingError
from pipeline.runtime.process.distributed import own_store
from pipeline.runtime.process.exit_codes import REQUEUE
from tests.support.forks import WarmCommand
from tests.support.messages import names
from tests.support.ranks import RankPool

FAST = StreamConfig(poll_s=0.001, idle_s=0.01)
CRITEO = DataConfig(name="clicks", format="criteo_tsv")


def _text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _csv(folder: Path) -> FolderSource:
    data = load_config(RetrainJob, ["data.name=x", "data.format=csv", "data.columns.label=y", "data.columns.sparse=[a]", f"source={folder}"]).data  # fmt: skip
    return FolderSource(str(folder), FAST, data)


def test_files_are_read_on_from_where_they_were_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text(_text("y,a", "1,u", "0,v") + "1,")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "c.csv.partial").write_text(_text("y,a", "1,q"))
    source, offsets = _csv(tmp_path), {}
    first = source.read(offsets, 1)
    assert first is not None and (first.lines, first.begin, first.ends, first.names) == ([b"1,u"], 4, [8], ("y", "a"))
    offsets["b.csv"] = 8
    second = source.read(offsets, 9)
    assert second is not None and second.lines == [b"0,v"], "a line counts once it has its end"
    offsets["b.csv"] = second.range.end
    assert source.read(offsets, 9) is None and source.behind(offsets) == 2
    (tmp_path / "2026").mkdir()
    (tmp_path / "2026" / "a.csv").write_text(_text("a,y", "w,1"))  # columns of its own order
    with open(tmp_path / "b.csv", "a") as file:
        file.write(_text("x"))
    early = source.read(offsets, 9)
    assert early is not None and (early.partition, early.lines, early.names) == ("2026/a.csv", [b"w,1"], ("a", "y"))
    offsets[early.partition] = early.range.end
    grown = source.read(offsets, 9)
    assert grown is not None and grown.lines == [b"1,x"]
    assert source.reread(Range("b.csv", 4, 12)).lines == [b"1,u", b"0,v"]
    assert source.reread(Range("b.csv", 4, 12)).ends == [8, 12]
    assert source.newest() == {"2026/a.csv": 8, "b.csv": 16}
    (tmp_path / "b.csv").write_text("y,a\n")
    with pytest.raises(DataError, match=names("b.csv 12")):
        source.read(offsets, 9)


def test_what_no_stream_can_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=names("source")):
        FolderSource(str(tmp_path / "none"), FAST, CRITEO)
    words = ["experiment=quickstart", f"source={tmp_path}"]
    for wrong, named in [
        (["follow=true", "trainer.gradient_accumulation_steps=2"], "gradient_accumulation_steps"),
        (["follow=true", "stream.kind=kafka"], "bootstrap.servers"),
        (["follow=true", "stream.kind=kinesis"], "stream.kind"),
        (["publishing.when=every_minute"], "follow=true"),
    ]:
        with pytest.raises(ConfigError, match=names(named)):
            load_config(RetrainJob, [*words, *wrong])


def test_a_journal_gives_back_what_follows_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "stream" / "journal.jsonl"
    journal = Journal(str(path))
    for batch in range(4):
        journal.append(batch, [Range("a", batch, batch + 1), Range("b", 0, batch)])
    journal.close()
    with open(path, "a") as file:
        file.write('{"batch": 4, "ranges": [["a", 4')
    journal = Journal(str(path))
    assert journal.after(2) == [[Range("a", 2, 3), Range("b", 0, 2)], [Range("a", 3, 4), Range("b", 0, 3)]]
    journal.append(4, [Range("c", 0, 9)])
    assert [each[0].partition for each in journal.after(2)] == ["a", "a", "c"]
    assert journal.after(7) == []
    journal.append(9, [])
    assert len(journal.after(0)) == 5, "what follows a gap is not known to be the batch after"


@pytest.fixture(scope="module")
def clicks(prepared_clicks: str) -> tuple[DataConfig, list[bytes]]:
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines()
    return replace(CRITEO, path=prepared_clicks), lines


@pytest.fixture(scope="module")
def encoder(clicks: tuple[DataConfig, list[bytes]]) -> LineEncoder:
    data, _ = clicks
    return LineEncoder(data, load_dataset(data.path), FAST, [Target("label")], lambda features: features)


def _rows(batch: Batch) -> list[bytes]:
    """Each row's bytes: dense, label and ids, of features of one id each."""
    ids = batch.sparse_features.values().view(-1, batch.batch_size).numpy()
    dense, labels = batch.dense_features.numpy(), batch.labels.numpy()
    return [dense[i].tobytes() + labels[i].tobytes() + ids[:, i].tobytes() for i in range(batch.batch_size)]


def test_lines_are_encoded_as_they_were_prepared(clicks: tuple[DataConfig, list[bytes]], encoder: LineEncoder) -> None:
    data, lines = clicks
    encoded = encoder.encode([Lines("a", 0, lines[:1200], list(range(1, 1201)))])
    reader = ShardReader(
        data.path, load_dataset(data.path), "train", global_batch_size=512, rank=0, world_size=1,
        config=ReaderConfig(shuffle="none", num_streams=1), seed=0,
    )  # fmt: skip
    batches = reader.batches(0)
    prepared = _rows(next(batches))
    batches.close()
    found = iter(_rows(encoded.batch))
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


def _reader(folder: Path, run: Path, encoder: LineEncoder) -> StreamReader:
    return StreamReader(
        FolderSource(str(folder), FAST, CRITEO), encoder, Journal(str(run / "journal.jsonl")),
        name=f"folder:{folder}", batch_size=50, stream=FAST, config=ReaderConfig(), quarantine=Quarantine(),
    )  # fmt: skip


def _until_the_end(batches: Iterator[Batch]) -> list[list[bytes]]:
    found = []
    with pytest.raises(EndOfInputError):
        while True:
            found.append(_rows(next(batches)))
    return found


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
    given = _until_the_end(reader.batches(0))
    assert len(given) == 4 and reader.progress(1)["stream_batches_ahead"] == 3
    place = json.loads(json.dumps(reader.place(2)))
    assert place["batch"] == 2 and list(place["offsets"]) == ["b.tsv"]
    reader.close()
    write("a.tsv", 300, 400)  # now the first by its name
    write("b.tsv", 230, 260)
    again = _reader(folder, run, encoder)
    again.go_to(2, place)
    found = _until_the_end(again.batches(0, 2))
    assert found[:2] == given[2:] and len(found) == 5, "two as they were, and 100 + 60 rows more"
    rows = [row for batch in [*given[:2], *found] for row in batch]
    expected = _rows(
        encoder.encode([Lines("all", 0, lines[:200] + lines[300:400] + lines[200:250], list(range(350)))]).batch
    )
    assert rows == expected, "each row once"
    skipping = _reader(folder, run, encoder)
    skipping.go_to(2, place)
    assert _until_the_end(skipping.batches(0, 4)) == found[2:], "a rollback leaves two batches out"
    other = _reader(tmp_path, run, encoder)
    with pytest.raises(RetrainingError, match=names("run_dir")):
        other.go_to(2, place)


def _read_on_ranks(rank: int, prepared: str, folder: str, run: str, place: Any) -> tuple[list[list[bytes]], Any, int]:
    """This rank's rows of each batch of 48 rows, where batch 2 begins, and how many more come after a rollback to it."""
    data, world_size = replace(CRITEO, path=prepared), dist.get_world_size()
    encoder = LineEncoder(data, load_dataset(data.path), FAST, [Target("label")], lambda features: features)
    reader = StreamReader(
        FolderSource(folder, FAST, CRITEO), encoder, Journal(f"{run}/journal.jsonl") if rank == 0 else None, name="clicks",
        batch_size=48 // world_size, stream=FAST, config=ReaderConfig(), quarantine=Quarantine(),
        ranks=StreamRanks(own_store("stream"), rank, world_size) if world_size > 1 else None,
    )  # fmt: skip
    if place is not None:
        reader.go_to(2, place)
        return _until_the_end(reader.batches(0, 2)), None, 0
    dropped = reader.batches(0)
    next(dropped)
    dropped.close()  # a rollback: what was read ahead counts nothing
    found = _until_the_end(reader.batches(0))
    place = reader.place(2)
    return found, place, len(_until_the_end(reader.batches(0, 2)))


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


def _words(prepared: str, source: Path, run: Path, *more: str) -> list[str]:
    return [
        "experiment=quickstart", "hardware=cpu", "follow=true", f"source={source}", f"data.path={prepared}", f"run_dir={run}",
        f"registry.path={run}/registry", "trainer.global_batch_size=100", "checkpoint.save_every_minutes=null",
        "checkpoint.save_every_steps=7", "checkpoint.differential=true", "stream.poll_s=0.05", "trainer.log_every_steps=5",
        "tables.default.embedding_dim=4", "model.dense_arch_layer_sizes=[16,4]", "model.over_arch_layer_sizes=[16,1]",
        "trainer.evaluate_max_batches=1", "data.reader.num_streams=20", *more,
    ]  # fmt: skip


def _newest(run: Path) -> int:
    folder = run / "follow" / "checkpoints"
    return max(list_steps(str(folder)), default=-1) if folder.is_dir() else -1


def _values(run: Path, step: int) -> Any:
    """Of the step: its tensors, whole, whatever chain it is of."""
    from pipeline.checkpoint.chains import open_tensors

    tensors = open_tensors(step_path(str(run / "follow" / "checkpoints"), step))
    return {key: tensors.read(key, [0] * len(tensors.shape(key)), tensors.shape(key)) for key in tensors.entries}


@pytest.mark.campaign
def test_a_training_that_is_killed_goes_on_to_the_bits_of_one_that_was_not(
    prepared_clicks: str, tmp_path: Path
) -> None:
    """Killed by SIGKILL at three places and ended once by SIGTERM, while files come and grow."""
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines(keepends=True)
    whole, source = tmp_path / "whole", tmp_path / "source"
    source.mkdir()

    def write(name: str, first: int, last: int) -> None:
        with open(source / name, "ab") as file:
            file.write(b"".join(lines[first:last]))

    def command(run: Path, *more: str) -> WarmCommand:
        return WarmCommand("pipeline.retrain", _words(prepared_clicks, source, run, *more), output=(1, 2))

    run = tmp_path / "killed"
    write("b.tsv", 0, 2500)
    for number, (wanted, more) in enumerate(
        [(14, ("c.tsv", 2500, 4000)), (28, ("a.tsv", 4000, 5000)), (42, ("c.tsv", 5000, 6050))]
    ):
        process = command(run)
        try:
            _wait(lambda wanted=wanted: _newest(run) >= wanted, process)  # type: ignore[misc]
            write(*more)
            time.sleep(0.3)
            process.send_signal(signal.SIGKILL if number != 1 else signal.SIGTERM)
            code = process.wait(60)
            assert code == (-signal.SIGKILL if number != 1 else REQUEUE)
        finally:
            process.kill()
    assert command(run, "stream.idle_s=1").wait(120) == 0
    assert _newest(run) == 60
    # What an uninterrupted training reads is what the journal says that the killed one has read.
    journal = [json.loads(line) for line in (run / "follow/stream/journal.jsonl").read_text().splitlines()]
    assert [entry["batch"] for entry in journal] == list(range(60))
    rows = sum(len(_of(source, each)) for entry in journal for each in entry["ranges"])
    assert rows == 6000 and len({(name, begin) for entry in journal for name, begin, _ in entry["ranges"]}) == sum(len(entry["ranges"]) for entry in journal)  # fmt: skip
    (whole / "follow/stream").mkdir(parents=True)
    (whole / "follow/stream/journal.jsonl").write_text((run / "follow/stream/journal.jsonl").read_text())
    assert command(whole, "stream.idle_s=1").wait(120) == 0
    assert _newest(whole) == 60
    ours, theirs = (_values(each, 60) for each in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def _of(source: Path, place: list[Any]) -> list[bytes]:
    name, begin, end = place
    return (source / name).read_bytes()[begin:end].splitlines()


def _wait(done: Any, process: WarmCommand, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.campaign
def test_two_ranks_that_were_stopped_go_on_to_the_bits_of_two_that_were_not(
    prepared_clicks: str, tmp_path: Path
) -> None:
    """Ended once by SIGTERM while rows come, and once while there are none; one rank trains on the same rows, to rounding."""
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines(keepends=True)
    source, run = tmp_path / "source", tmp_path / "stopped"
    source.mkdir()

    def command(run: Path, num_ranks: int, *more: str) -> WarmCommand:
        words = ["--nproc-per-node", str(num_ranks), "-m", "pipeline.retrain"]
        return WarmCommand("pipeline.agent", [*words, *_words(prepared_clicks, source, run, *more)], output=(1, 2))

    (source / "a.tsv").write_bytes(b"".join(lines[:2530]))
    for wanted, more in [(7, lines[2530:4010]), (36, [])]:
        process = command(run, 2)
        try:
            _wait(lambda wanted=wanted: _newest(run) >= wanted or _batches(run) > wanted + 3, process)  # type: ignore[misc]
            (source / f"{wanted}.tsv").write_bytes(b"".join(more))
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == REQUEUE
        finally:
            process.kill()
    (source / "z.tsv").write_bytes(b"".join(lines[4010:5020]))
    assert command(run, 2, "stream.idle_s=1").wait(200) == 0
    assert _newest(run) == 50
    for name, num_ranks in [("whole", 2), ("alone", 1)]:
        (tmp_path / name / "follow/stream").mkdir(parents=True)
        journal = (run / "follow/stream/journal.jsonl").read_text()
        (tmp_path / name / "follow/stream/journal.jsonl").write_text(journal)
        assert command(tmp_path / name, num_ranks, "stream.idle_s=1").wait(200) == 0
    ours, whole, alone = (_values(each, 50) for each in (run, tmp_path / "whole", tmp_path / "alone"))
    assert ours.keys() == whole.keys() and all(torch.equal(ours[key], whole[key]) for key in ours)
    tables = [key for key in ours if key in alone and key.endswith(".weight")]
    assert tables
    for key in tables:
        torch.testing.assert_close(ours[key], alone[key], rtol=1e-3, atol=1e-4)


@pytest.mark.campaign
def test_two_ranks_of_which_one_is_killed_go_on_to_the_bits_of_two_that_were_not(
    prepared_clicks: str, tmp_path: Path
) -> None:
    """SIGKILL of rank 1, and then of rank 0, which reads the stream; the agent starts both again."""
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines(keepends=True)
    source, run, whole = tmp_path / "source", tmp_path / "killed", tmp_path / "whole"
    source.mkdir()

    def command(run: Path, *more: str) -> WarmCommand:
        words = ["--nproc-per-node", "2", "--max-restarts", "3", "-m", "pipeline.retrain"]
        return WarmCommand("pipeline.agent", [*words, *_words(prepared_clicks, source, run, *more)], output=(1, 2))

    (source / "a.tsv").write_bytes(b"".join(lines[:2030]))
    process = command(run, "stream.idle_s=20")
    try:
        for rank, wanted, more in [(1, 7, lines[2030:3520]), (0, 28, lines[3520:5020])]:
            _wait(lambda wanted=wanted: _newest(run) >= wanted, process)  # type: ignore[misc]
            os.kill(_process_of(run, rank), signal.SIGKILL)
            (source / f"{wanted}.tsv").write_bytes(b"".join(more))
        assert process.wait(300) == 0
    finally:
        process.kill()
    assert _newest(run) == 50
    (whole / "follow/stream").mkdir(parents=True)
    (whole / "follow/stream/journal.jsonl").write_text((run / "follow/stream/journal.jsonl").read_text())
    assert command(whole, "stream.idle_s=1").wait(200) == 0
    ours, theirs = (_values(each, 50) for each in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    journal = [json.loads(line) for line in (run / "follow/stream/journal.jsonl").read_text().splitlines()]
    assert [entry["batch"] for entry in journal] == list(range(50))


def _process_of(run: Path, rank: int) -> int:
    """The newest process that has RANK=`rank` and this run's folder among its words."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            environment = (folder / "environ").read_bytes().split(b"\0") if folder.name.isdigit() else []
            words = (folder / "cmdline").read_bytes() if environment else b""
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and f"run_dir={run}".encode() in words:
            found.append(int(folder.name))
    return max(found)


def _batches(run: Path) -> int:
    journal = run / "follow/stream/journal.jsonl"
    return len(journal.read_bytes().splitlines()) if journal.exists() else 0


@pytest.mark.campaign
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_topic_is_trained_on_once_though_the_training_is_killed(
    prepared_clicks: str, tmp_path: Path, num_ranks: int
) -> None:
    """Three partitions, by librdkafka's own mock brokers; rows come while it trains."""
    kafka = pytest.importorskip("confluent_kafka")
    client = kafka.Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1})
    address = ",".join(f"{each.host}:{each.port}" for each in client.list_topics(timeout=10).brokers.values())
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines()

    def send(first: int, last: int) -> None:
        for number in range(first, last):
            client.produce("clicks", lines[number], partition=number % 3)
        assert client.flush(30) == 0

    def command(run: Path, *more: str) -> WarmCommand:
        options = f"stream.options={{bootstrap.servers: '{address}'}}"
        words = _words(prepared_clicks, Path("clicks"), run, "stream.kind=kafka", options, *more)
        if num_ranks == 1:
            return WarmCommand("pipeline.retrain", words, output=(1, 2))
        launch = ["--nproc-per-node", str(num_ranks), "-m", "pipeline.retrain"]
        return WarmCommand("pipeline.agent", [*launch, *words], output=(1, 2))

    run, whole = tmp_path / "killed", tmp_path / "whole"
    send(0, 1600)
    process = command(run)
    try:
        _wait(lambda: _newest(run) >= 14, process)
        send(1600, 3030)
        _wait(lambda: _newest(run) >= 21, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
    assert command(run, "stream.idle_s=3").wait(120) == 0
    journal = [json.loads(line) for line in (run / "follow/stream/journal.jsonl").read_text().splitlines()]
    assert [entry["batch"] for entry in journal] == list(range(30)) and _newest(run) == 30
    for partition in ("0", "1", "2"):
        own = [(begin, end) for entry in journal for name, begin, end in entry["ranges"] if name == partition]
        assert own[0][0] == 0 and all(one[1] == two[0] for one, two in itertools.pairwise(own)), own
    assert sum(end - begin for entry in journal for _, begin, end in entry["ranges"]) == 3000
    (whole / "follow/stream").mkdir(parents=True)
    (whole / "follow/stream/journal.jsonl").write_text((run / "follow/stream/journal.jsonl").read_text())
    assert command(whole, "stream.idle_s=3").wait(120) == 0
    ours, theirs = (_values(each, 30) for each in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.campaign
def test_a_server_takes_what_a_training_that_follows_publishes(prepared_clicks: str, tmp_path: Path) -> None:
    from pipeline.serving.scoring.patching import catch_up
    from pipeline.serving.scoring.predictor import Predictor

    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines(keepends=True)
    (source / "a.tsv").write_bytes(b"".join(lines[:3000]))
    words = _words(
        prepared_clicks,
        source,
        run,
        "publishing.when=every_10_steps",
        "publishing.gate.max_rows=300",
        "checkpoint.keep_last_n=9",
        "stream.idle_s=2",
    )
    process = WarmCommand("pipeline.retrain", words, output=(1, 2))
    assert process.wait(300) == 0
    artifact = str(run / "follow/artifacts/published")
    predictor = Predictor.load(artifact)
    catch_up(predictor, artifact)
    assert predictor.sequence >= 1 and predictor.applied is not None and predictor.applied.step == 30
