"""Observers see each answered request, with what its rows became, and no answer depends on them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.serving.http import observers
from pipeline.serving.http.batching import Scores, ServerMetrics
from pipeline.serving.http.observers import Answered, Observers
from pipeline.serving.scoring.encoded import Encoded, EncodedSpan, features_of
from tests.serving.requests import post
from tests.serving.servers import ROW, server_of, write_artifact
from tests.serving.test_switching import wait_until

PLUGIN = "plugins=[tests.plugins.sample_plugin]"


@pytest.mark.long
def test_an_observer_sees_what_was_answered_and_ends_with_the_server(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    with server_of(write_artifact(tmp_path, "v1"), PLUGIN, f"observers.line_for_each.path={lines}") as server:
        given = post(server, [ROW, ROW], headers={"X-Request-ID": "mine-1"})
        made = post(server, [ROW], headers={"X-Request-ID": "two words"})
        assert post(server, [{"unknown": 1}]).status_code == 422
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    own = made.headers["x-request-id"]
    assert given.headers["x-request-id"] == "mine-1" and len(own) == 32
    assert lines.read_text().splitlines() == ["mine-1 v1 2", f"{own} v1 1", "end"]


@pytest.mark.long
def test_an_observer_that_fails_fails_no_request_and_a_router_can_turn_one_away(tmp_path: Path) -> None:
    options = [f"observers.line_for_each.path={tmp_path / 'lines'}", "observers.line_for_each.fails=true"]
    options.append("router.doorkeeper.refused=not-")
    with server_of(write_artifact(tmp_path, "v1"), PLUGIN, *options) as server:
        assert all(post(server, [ROW]).status_code == 200 for _ in range(3))
        assert post(server, [ROW], headers={"X-Request-ID": "not-me"}).status_code == 403
        wait_until(lambda: server.metric("observer_failures_total") == 3)
        assert "no line today" in server.log()


class _Slow:
    def __init__(self) -> None:
        self.taken: list[str] = []
        self.may_go_on, self.has_begun = threading.Event(), threading.Event()

    def wants(self, answered: Answered) -> bool:
        return answered.request_id != "unwanted"

    def take(self, answered: Sequence[Answered]) -> None:
        if answered:
            self.has_begun.set()
            self.may_go_on.wait()
        self.taken += [each.request_id for each in answered]

    def close(self) -> None:
        self.taken.append("end")


def test_what_a_slow_observer_cannot_take_is_dropped_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(observers, "QUEUED_ROWS", 5)
    metrics, slow = ServerMetrics(), _Slow()
    shown = Observers({"slow": slow}, metrics)

    def show(request_id: str, num_rows: int) -> None:
        rows = pa.table({"a": range(num_rows)})
        shown.show(Answered(request_id, 0.0, rows, Scores(np.zeros(num_rows), []), SimpleNamespace()))

    show("first", 2)
    slow.has_begun.wait()
    for request_id, num_rows in (("unwanted", 1), ("second", 2), ("too much", 2), ("third", 1)):
        show(request_id, num_rows)
    slow.may_go_on.set()
    shown.close()
    assert slow.taken == ["first", "second", "third", "end"]
    assert metrics.observer_drops.labels("slow")._value.get() == 1


def test_the_features_of_a_request_are_cut_out_of_its_batch() -> None:
    # Two features and three rows that could be read; row 1 of four is bad.
    values = torch.tensor([10, 11, 12, 20, 21, 22, 23])
    offsets = torch.tensor([0, 1, 2, 3, 5, 5, 7])
    part = Encoded(np.array([0, 2, 3]), torch.arange(3.0)[:, None], lambda: (values, offsets))
    found = features_of([EncodedSpan([part], 1, 4)], 2)
    assert found.kept.tolist() == [1, 2] and found.dense.tolist() == [[1.0], [2.0]]
    assert [each.tolist() for each in found.values] == [[11, 12], [22, 23]]
    assert [each.tolist() for each in found.lengths] == [[1, 1], [0, 2]]
    twice = features_of([EncodedSpan([part], 0, 1), EncodedSpan([part], 0, 4)], 2)
    assert twice.kept.tolist() == [0, 1, 3, 4] and twice.lengths[1].tolist() == [2, 2, 0, 2]
    assert features_of([], 2).kept.tolist() == []
