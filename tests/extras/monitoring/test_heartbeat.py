"""A monitor outside the cluster hears of a training as long as it gets on, and how it ended."""

from __future__ import annotations

import http.server
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import LoggerConfig
from pipeline.extras.monitoring.hooks.heartbeat import Heartbeat, SendHeartbeat
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names

WRITER: Any = SimpleNamespace(writer=object())


@pytest.fixture
def monitor() -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """Its address, and what it gets."""
    heard: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/ping/key" and self.headers["Content-Type"] == "application/json"
            heard.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}/ping/key", heard
    server.shutdown()
    server.server_close()


def _hook(url: str, **logger: Any) -> SendHeartbeat:
    job = TrainJob(name="clicks", run_dir="runs/clicks", logger=LoggerConfig(heartbeat_url=url, **logger))
    return SendHeartbeat(job, WRITER)


def _state(step: int = 0, preempted: bool = False) -> Any:
    return SimpleNamespace(step=step, total_steps=90, preempted=preempted)


@pytest.mark.parametrize("ends", ["finished", "stopped", "failed"])
def test_a_monitor_hears_start_progress_and_end(
    monitor: tuple[str, queue.Queue[dict[str, Any]]], ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    url, heard = monitor
    hook = _hook(url, heartbeat_every_s=0.01)
    hook.on_train_start(_state(10))
    first = heard.get(timeout=60)
    assert (first["run"], first["state"], first["step"], first["steps"]) == ("clicks", "started", 10, 90)
    assert (first["host"], first["job"], first["attempt"]) == (socket.gethostname(), "13", "2.0")
    hook.on_step_end(_state(11))
    second = heard.get(timeout=60)
    assert (second["state"], second["step"]) == ("training", 11)
    if ends != "failed":  # an error is what on_fit_end does not come after
        hook.on_fit_end(_state(12, preempted=ends == "stopped"))
    hook.close()
    assert heard.get(timeout=60)["state"] == ends
    assert heard.empty()


def test_a_training_that_stands_still_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat("http://localhost/none", 60.0, {})
    progress: Callable[[], float] = iter([0.0, 0.0, 5.0, 5.0, 6.0]).__next__
    monkeypatch.setattr("pipeline.extras.monitoring.hooks.heartbeat.watchdog.progress_at", progress)
    waits = iter([False, False, False, False, True])
    heartbeat._ended = SimpleNamespace(wait=lambda seconds: next(waits))
    sent: list[None] = []
    monkeypatch.setattr(heartbeat, "_send", lambda: sent.append(None))
    heartbeat._run()
    assert len(sent) == 4  # at once, at 5 and at 6, which an evaluation's batches may be, and at the end


def test_a_monitor_that_is_away_costs_a_warning_without_its_key(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("localhost", 0)) as closed:
        port = closed.getsockname()[1]
    hook = _hook(f"http://localhost:{port}/ping/key")
    hook.on_train_start(_state())
    hook.on_step_end(_state(1))
    hook.close()
    (record,) = caplog.records  # of two that were sent
    assert "no heartbeat reaches localhost" in record.getMessage() and "key" not in record.getMessage()


def test_other_ranks_and_trainings_without_an_address_send_nothing(tmp_path: Path) -> None:
    other: Any = SimpleNamespace(writer=None)
    for hook in (SendHeartbeat(TrainJob(name="clicks"), WRITER), SendHeartbeat(_hook("http://localhost").job, other)):
        hook.on_train_start(_state())
        assert hook._heartbeat is None
        hook.on_step_end(_state(1))
        hook.close()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=names("logger.heartbeat_url=hc-ping.com/1 https://")):
        LoggerConfig(heartbeat_url="hc-ping.com/1")
    with pytest.raises(ConfigError, match=names("logger.heartbeat_every_s")):
        LoggerConfig(heartbeat_every_s=0.0)
