"""A training follows files that are added and grow, and each row is trained on once: also where it is killed and goes on."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.runtime.process.exit_codes import REQUEUE
from pipeline.serving.scoring.predictor import Predictor
from tests.extras.stream.following import copy_journal, follow_words, newest_step, start_retrain, values_of, wait_until
from tests.support.forks import WarmCommand


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
        return start_retrain(follow_words(prepared_clicks, source, run, *more))

    run = tmp_path / "killed"
    write("b.tsv", 0, 2500)
    for number, (wanted, more) in enumerate(
        [(14, ("c.tsv", 2500, 4000)), (28, ("a.tsv", 4000, 5000)), (42, ("c.tsv", 5000, 6050))]
    ):
        process = command(run)
        try:
            wait_until(lambda wanted=wanted: newest_step(run) >= wanted, process)
            write(*more)
            time.sleep(0.3)
            process.send_signal(signal.SIGKILL if number != 1 else signal.SIGTERM)
            code = process.wait(60)
            assert code == (-signal.SIGKILL if number != 1 else REQUEUE)
        finally:
            process.kill()
    assert command(run, "stream.idle_s=1").wait(120) == 0
    assert newest_step(run) == 60
    # What an uninterrupted training reads is what the journal says that the killed one has read.
    journal = [json.loads(line) for line in (run / "follow/stream/journal.jsonl").read_text().splitlines()]
    assert [entry["batch"] for entry in journal] == list(range(60))
    rows = sum(len(_of(source, each)) for entry in journal for each in entry["ranges"])
    assert rows == 6000 and len({(name, begin) for entry in journal for name, begin, _ in entry["ranges"]}) == sum(
        len(entry["ranges"]) for entry in journal
    )
    copy_journal(run, whole)
    assert command(whole, "stream.idle_s=1").wait(120) == 0
    assert newest_step(whole) == 60
    ours, theirs = (values_of(each, 60) for each in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def _of(source: Path, place: list[Any]) -> list[bytes]:
    name, begin, end = place
    return (source / name).read_bytes()[begin:end].splitlines()


def _published_step(run: Path) -> int:
    artifact = str(run / "follow/artifacts/published")
    if not os.path.exists(artifact):
        return -1
    predictor = Predictor.load(artifact)
    predictor.catch_up(artifact)
    return predictor.applied.step if predictor.applied else int(predictor.manifest.lineage["step"])


@pytest.mark.campaign
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_training_publishes_in_a_pause_and_then_reads_on(
    prepared_clicks: str, tmp_path: Path, num_ranks: int
) -> None:
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines(keepends=True)
    source, run, whole = tmp_path / "source", tmp_path / "run", tmp_path / "whole"
    source.mkdir()
    (source / "a.tsv").write_bytes(b"".join(lines[:1230]))
    words = ["publishing.when=every_2_seconds", "publishing.gate.max_rows=300", "checkpoint.save_every_steps=0"]
    process = start_retrain(follow_words(prepared_clicks, source, run, *words, "stream.idle_s=300"), num_ranks)
    try:
        wait_until(lambda: newest_step(run) == 12, process)  # the last batch, which is read ahead otherwise
        wait_until(lambda: _published_step(run) == 12, process)
        (source / "b.tsv").write_bytes(b"".join(lines[1230:2000]))
        wait_until(lambda: newest_step(run) == 20, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == REQUEUE
    finally:
        process.kill()
    copy_journal(run, whole)
    words = ["checkpoint.save_every_steps=0", "stream.idle_s=1"]
    assert start_retrain(follow_words(prepared_clicks, source, whole, *words), num_ranks).wait(120) == 0
    ours, theirs = (values_of(each, 20) for each in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.campaign
def test_two_ranks_that_were_stopped_go_on_to_the_bits_of_two_that_were_not(
    prepared_clicks: str, tmp_path: Path
) -> None:
    """Ended once by SIGTERM while rows come, and once while there are none; one rank trains on the same rows, to rounding."""
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines(keepends=True)
    source, run = tmp_path / "source", tmp_path / "stopped"
    source.mkdir()

    def command(run: Path, num_ranks: int, *more: str) -> WarmCommand:
        return start_retrain(follow_words(prepared_clicks, source, run, *more), num_ranks)

    (source / "a.tsv").write_bytes(b"".join(lines[:2530]))
    for wanted, more in [(7, lines[2530:4010]), (36, [])]:
        process = command(run, 2)
        try:
            wait_until(lambda wanted=wanted: newest_step(run) >= wanted or _batches(run) > wanted + 3, process)
            (source / f"{wanted}.tsv").write_bytes(b"".join(more))
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == REQUEUE
        finally:
            process.kill()
    (source / "z.tsv").write_bytes(b"".join(lines[4010:5020]))
    assert command(run, 2, "stream.idle_s=1").wait(200) == 0
    assert newest_step(run) == 50
    for name, num_ranks in [("whole", 2), ("alone", 1)]:
        copy_journal(run, tmp_path / name)
        assert command(tmp_path / name, num_ranks, "stream.idle_s=1").wait(200) == 0
    ours, whole, alone = (values_of(each, 50) for each in (run, tmp_path / "whole", tmp_path / "alone"))
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
        return start_retrain(follow_words(prepared_clicks, source, run, *more), num_ranks=2, max_restarts=3)

    (source / "a.tsv").write_bytes(b"".join(lines[:2030]))
    process = command(run, "stream.idle_s=20")
    try:
        for rank, wanted, more in [(1, 7, lines[2030:3520]), (0, 28, lines[3520:5020])]:
            wait_until(lambda wanted=wanted: newest_step(run) >= wanted, process)
            os.kill(_process_of(run, rank), signal.SIGKILL)
            (source / f"{wanted}.tsv").write_bytes(b"".join(more))
        assert process.wait(300) == 0
    finally:
        process.kill()
    assert newest_step(run) == 50
    copy_journal(run, whole)
    assert command(whole, "stream.idle_s=1").wait(200) == 0
    ours, theirs = (values_of(each, 50) for each in (run, whole))
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
        words = follow_words(prepared_clicks, Path("clicks"), run, "stream.kind=kafka", options, *more)
        return start_retrain(words, num_ranks)

    run, whole = tmp_path / "killed", tmp_path / "whole"
    send(0, 1600)
    process = command(run)
    try:
        wait_until(lambda: newest_step(run) >= 14, process)
        send(1600, 3030)
        wait_until(lambda: newest_step(run) >= 21, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
    assert command(run, "stream.idle_s=3").wait(120) == 0
    journal = [json.loads(line) for line in (run / "follow/stream/journal.jsonl").read_text().splitlines()]
    assert [entry["batch"] for entry in journal] == list(range(30)) and newest_step(run) == 30
    for partition in ("0", "1", "2"):
        own = [(begin, end) for entry in journal for name, begin, end in entry["ranges"] if name == partition]
        assert own[0][0] == 0 and all(one[1] == two[0] for one, two in itertools.pairwise(own)), own
    assert sum(end - begin for entry in journal for _, begin, end in entry["ranges"]) == 3000
    copy_journal(run, whole)
    assert command(whole, "stream.idle_s=3").wait(120) == 0
    ours, theirs = (values_of(each, 30) for each in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.campaign
def test_a_server_takes_what_a_training_that_follows_publishes(prepared_clicks: str, tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    lines = (Path(prepared_clicks).parent / "clicks.tsv").read_bytes().splitlines(keepends=True)
    (source / "a.tsv").write_bytes(b"".join(lines[:3000]))
    words = follow_words(
        prepared_clicks,
        source,
        run,
        "publishing.when=every_10_steps",
        "publishing.gate.max_rows=300",
        "checkpoint.keep_last_n=9",
        "stream.idle_s=2",
    )
    assert start_retrain(words).wait(300) == 0
    artifact = str(run / "follow/artifacts/published")
    predictor = Predictor.load(artifact)
    predictor.catch_up(artifact)
    assert predictor.sequence >= 1 and predictor.applied is not None and predictor.applied.step == 30
