"""A server that follows a registry's champion, by real processes and real artifacts: no request is dropped, no score mixed."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving_artifacts import DENSE, SPARSE, Shape, write_artifact
from pipeline.retraining.find_artifact import find_artifact
from pipeline.retraining.registry import Registry, Version
from pipeline.serving.scoring.predictor import Predictor
from tests.serving.requests import Load
from tests.serving.servers import Server, running

ROWS = 50  # of a table


def publish(registry: Registry, artifact: Path) -> Version:
    files = {
        f"artifact/{path.relative_to(artifact)}": str(path) for path in sorted(artifact.rglob("*")) if path.is_file()
    }
    return registry.publish(registry.next_name(), files, {"from": artifact.name})


def draw(chance: random.Random) -> list[dict[str, object]]:
    return [
        {name: chance.randrange(100) for name in DENSE} | {name: str(chance.randrange(ROWS)) for name in SPARSE}
        for _ in range(chance.randrange(1, 9))
    ]


class Expected:
    """What each version gives; one caller at a time, and within what a product of another number of rows rounds to."""

    def __init__(self, artifacts: list[Path]) -> None:
        predictors = [Predictor.load(str(artifact)) for artifact in artifacts]
        self._predictors, self._lock = {one.version: one for one in predictors}, threading.Lock()
        self.versions = [one.version for one in predictors]

    def are(self, rows: list[dict[str, object]], version: str, scores: list[float]) -> bool:
        import pyarrow as pa

        columns = {name: [float(row[name]) for row in rows] for name in DENSE}
        with self._lock:
            wanted = self._predictors[version].score(pa.table(columns | {name: [row[name] for row in rows] for name in SPARSE})).scores  # fmt: skip
        return bool(np.allclose(wanted, scores, rtol=0, atol=1e-5))


def wait_for(server: Server, version: str) -> None:
    until = time.monotonic() + 300
    while server.client.get(f"{server.url}/health").json()["artifact"] != version:
        assert time.monotonic() < until, server.log()
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("moves", [3, pytest.param(40, marks=pytest.mark.campaign)])
def test_a_server_follows_the_champion_under_load_and_drops_nothing(tmp_path: Path, moves: int) -> None:
    artifacts = [write_artifact(tmp_path / precision, Shape(ROWS), precision) for precision in ("int8", "int4")]
    expected = Expected(artifacts)
    assert len(set(expected.versions)) == 2
    registry = Registry(str(tmp_path / "registry"))
    versions = [publish(registry, artifact) for artifact in artifacts]
    pointer = registry.promote(versions[0], None)
    with running("pipeline serve", f"artifact={registry.path}", "server.port=0", "server.watch_s=0.1") as server:
        wait_for(server, expected.versions[0])
        with Load(server.url, draw, expected.are, num_threads=3) as load:
            for move in range(1, moves + 1):
                pointer = registry.promote(versions[move % 2], pointer)
                wait_for(server, expected.versions[move % 2])
            assert find_artifact(registry.path).path == versions[moves % 2].artifact
            answered = len(load.versions)
            while len(load.versions) < answered + 20:
                time.sleep(0.02)
        assert server.metric("artifact_switches_total") == moves
        assert server.metric('requests_total{path="/score"') == len(load.versions) > 20 + moves
    assert load.failures == [] and set(load.versions) == set(expected.versions)
