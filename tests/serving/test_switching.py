"""A real server process: another artifact is taken up under load, and the end answers what is under way."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving.requests import Load, post
from tests.serving.servers import ROW, server_of, write_artifact
from tests.serving.stand_in import score_of

PATIENT = "batching.latency_budget_ms=60000"  # no request is put off, however slow the machine is


def stand_in_load(url: str, num_threads: int = 4) -> Load:
    def draw(chance: random.Random) -> list[dict[str, object]]:
        return [{**ROW, "age": chance.randrange(90)} for _ in range(chance.randrange(1, 8))]

    def are_scores(rows: list[dict[str, object]], version: str, scores: list[float]) -> bool:
        return scores == [score_of(row, version) for row in rows]

    return Load(url, draw, are_scores, num_threads)


def point(link: Path, target: Path) -> None:
    staged = link.with_name(f"{link.name}.new")
    staged.symlink_to(target)
    os.replace(staged, link)


def wait_until(holds: Callable[[], bool], timeout_s: float = 300.0) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until, "it never came to hold"
        time.sleep(0.02)


@pytest.mark.long
def test_a_switch_under_load_drops_no_request_and_mixes_no_scores(tmp_path: Path) -> None:
    artifacts = [write_artifact(tmp_path / version, version, delay_s=0.002) for version in ("v1", "v2")]
    link = tmp_path / "current"
    point(link, artifacts[0])
    with server_of(link, PATIENT) as server, stand_in_load(server.url) as load:
        for number in range(1, 13):
            point(link, artifacts[number % 2])
            wait_until(lambda: server.metric("artifact_switches_total") >= number)  # noqa: B023
            answered = len(load.versions)
            wait_until(lambda: len(load.versions) >= answered + 9)  # noqa: B023
        switches = server.metric("artifact_switches_total")
    assert load.failures == []
    assert (
        switches == 12 and {"v1", "v2"} == set(load.versions) and len(load.versions) > 100
    )  # nine a switch, however fast


@pytest.mark.long
def test_a_bad_artifact_is_refused_and_the_one_before_goes_on(tmp_path: Path) -> None:
    good, bad = write_artifact(tmp_path / "good", "v1"), write_artifact(tmp_path / "bad", "v2", damaged=True)
    link = tmp_path / "current"
    point(link, good)
    with server_of(link, PATIENT) as server, stand_in_load(server.url, 2) as load:
        point(link, bad)
        server.wait_for("does not match its checksum")
        os.remove(link)  # and nothing at all
        server.wait_for("neither an artifact nor a registry")
        assert server.metric("artifact_refusals_total") == 1
        assert server.client.get(f"{server.url}/health/ready").json() == {"status": "ready", "artifact": "v1"}
        point(link, write_artifact(tmp_path / "mended", "v3"))
        server.wait_for("artifact v3 serves now")
        assert server.log().count("v1 goes on") == 1
    assert load.failures == [] and set(load.versions) <= {"v1", "v3"}


@pytest.mark.long
def test_a_folder_that_is_replaced_is_taken_up(tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "artifact", "v1")
    with server_of(artifact, PATIENT) as server, stand_in_load(server.url, 2) as load:
        os.rename(artifact, tmp_path / "old")
        os.rename(write_artifact(tmp_path / "new", "v2"), artifact)
        server.wait_for("artifact v2 serves now")
    assert load.failures == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_answers_what_is_under_way(tmp_path: Path, number: signal.Signals) -> None:
    held_by = tmp_path / "scored"
    artifact = write_artifact(tmp_path / "artifact", "v1", held_by=str(held_by))
    with server_of(artifact) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server, [ROW])
        wait_until((tmp_path / "scored.begun").exists)
        server.process.send_signal(number)
        held_by.touch()
        assert waiting.result().json()["scores"] == [score_of(ROW, "v1")]
        assert server.process.wait(300) == (0 if number == signal.SIGTERM else 130)
        with pytest.raises(httpx.ConnectError):
            post(server, [ROW])


@pytest.mark.long
def test_readiness_ends_before_the_server_does(tmp_path: Path) -> None:
    with server_of(write_artifact(tmp_path, "v1"), "server.shutdown_delay_s=8") as server:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.client.get(f"{server.url}/health/ready").status_code == 503)
        assert server.client.get(f"{server.url}/health/live").status_code == 200
        assert post(server, [ROW]).status_code == 200
        assert server.process.wait(300) == 0
