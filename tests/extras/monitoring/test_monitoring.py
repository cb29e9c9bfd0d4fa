"""A training's numbers go to Prometheus, to trackers and as JSON to whatever collects logs; none of them can stop it."""

from __future__ import annotations

import http.server
import json
import logging
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import LoggerConfig, TrainerConfig
from pipeline.devices.process_group import init_distributed
from pipeline.extras.monitoring.hooks.monitor import Monitor
from pipeline.extras.monitoring.hooks.tracker import Forwarder, Track
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.logs import MetricsWriter, configure_logging, fields, get_logger
from pipeline.training.hooks.throughput import of_ranks, straggler_scores
from tests.support.messages import names
from tests.support.ranks import RankPool

MONITORING = Path(__file__).resolve().parents[3] / "launch" / "monitoring"


def _job(run: Path, port: int | None = None, **logger: Any) -> TrainJob:
    job = TrainJob(
        name="clicks", run_dir=str(run), trainer=TrainerConfig(metrics_port=port), logger=LoggerConfig(**logger)
    )
    job.data.name = "clicks_data"
    return job


def _parts(run: Path) -> Any:
    return SimpleNamespace(writer=MetricsWriter(str(run), tensorboard=False))


def _state(step: int = 0, saved_step: int = 0) -> Any:
    return SimpleNamespace(step=step, saved_step=saved_step, total_steps=90, of_ranks=[])


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    monitor = Monitor(_job(tmp_path, 0), _parts(tmp_path))
    yield monitor
    monitor.close()


def test_prometheus_gets_steps_metrics_restarts_and_the_age_of_the_checkpoint(monitor: Monitor, tmp_path: Path) -> None:
    start = {
        "time": "2026-01-01T00:00:00+00:00",
        "from_step": 0,
        "command": "c",
        "host": "h",
        "world_size": 1,
        "version": "1",
        "commit": "",
    }
    lines = [json.dumps({**start, "from_step": step}) for step in (0, 10)]
    (tmp_path / "starts.jsonl").write_text("\n".join(lines) + "\n")
    monitor.on_train_start(_state(10))
    monitor.parts.writer.write("train", 20, {"ne": 0.75, "input_stall_percent": 2.5})
    monitor.parts.writer.write("validation", 20, {"ne": 0.8, "undefined": "why"})
    before = monitor.served.registry.get_sample_value(
        "pipeline_training_last_checkpoint_timestamp_seconds", {"run": "clicks"}
    )
    state = _state(20, saved_step=20)
    state.of_ranks = [{"step_seconds": 0.5, "straggler_score": 1.0}, {"step_seconds": 0.5, "straggler_score": 1.75}]
    begun = time.time()
    monitor.on_step_end(state)
    port = monitor.served.server.server_port
    text = urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10).read().decode()
    assert begun - 1 <= float(re.findall(r"heartbeat_timestamp_seconds\{.*?\} (\S+)", text)[0]) <= time.time() + 1
    for line in (
        'pipeline_training_step{run="clicks"} 20.0',
        'pipeline_training_steps{run="clicks"} 90.0',
        'pipeline_training_restarts{run="clicks"} 1.0',
        'pipeline_training_metric{name="ne",run="clicks",split="train"} 0.75',
        'pipeline_training_metric{name="ne",run="clicks",split="validation"} 0.8',
        'pipeline_training_rank{name="straggler_score",rank="1",run="clicks"} 1.75',
        'pipeline_training_rank{name="step_seconds",rank="0",run="clicks"} 0.5',
    ):
        assert line in text
    saved = re.search(r"pipeline_training_last_checkpoint_timestamp_seconds\{.*?\} (\S+)", text)
    assert saved and float(saved[1]) >= before
    monitor.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("localhost", port)) != 0


class Collector:
    """Of OpenTelemetry: keeps what is sent, (gauge, labels) -> value."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.resource: dict[str, str] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.read(self.path, self.rfile.read(int(self.headers["Content-Length"])), self.headers.get("X-Key"))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def read(self, path: str, body: bytes, key: str | None) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        assert (path, key) == ("/v1/metrics", "of the collector")
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            self.resource |= {each.key: each.value.string_value for each in resource.resource.attributes}
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in metric.gauge.data_points:
                    labels = tuple(sorted((each.key, each.value.string_value) for each in point.attributes))
                    self.values[metric.name, labels] = point.as_double or float(point.as_int)


def test_a_collector_of_opentelemetry_gets_the_same_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otlp` is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=of%20the%20collector")
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    collector = Collector()
    endpoint = f"http://localhost:{collector.server.server_port}/"
    monitor = Monitor(_job(tmp_path, otlp_endpoint=endpoint, otlp_every_s=3600.0), _parts(tmp_path))
    monitor.on_train_start(_state(10))
    monitor.parts.writer.write("train", 20, {"ne": 0.75, "undefined": "why"})
    state = _state(20, saved_step=20)
    state.of_ranks = [{"straggler_score": 1.0}, {"straggler_score": 1.75}]
    monitor.on_step_end(state)
    monitor.close()  # sends what it has
    collector.server.shutdown()
    run = ("run", "clicks")
    assert collector.values["pipeline_training_step", (run,)] == 20.0
    assert collector.values["pipeline_training_metric", (("name", "ne"), run, ("split", "train"))] == 0.75
    assert collector.values["pipeline_training_rank", (("name", "straggler_score"), ("rank", "1"), run)] == 1.75
    assert collector.values["pipeline_training_heartbeat_timestamp_seconds", (run,)] > 1.7e9
    assert (collector.resource["job.id"], collector.resource["service.instance.id"]) == ("13", "clicks")


def test_an_address_that_no_collector_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=names("logger.otlp_endpoint=collector:4317 http://")):
        LoggerConfig(otlp_endpoint="collector:4317")


def test_a_port_that_is_taken_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        monitor = Monitor(_job(tmp_path, taken.getsockname()[1]), _parts(tmp_path))
        monitor.on_train_start(_state())
        monitor.on_step_end(_state(1, 1))
        monitor.close()
    assert "no metrics are served: trainer.metrics_port=" in caplog.text


def test_every_rule_has_a_condition_a_severity_and_words() -> None:
    (group,) = yaml.safe_load((MONITORING / "training_alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == 7
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"} and rule["expr"].strip()
        assert rule["labels"]["severity"] in ("page", "ticket") and "$labels.run" in rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[smhd]", rule.get("for", "1m"))


def test_the_rank_that_others_wait_for_scores_highest() -> None:
    assert straggler_scores([1.0, 1.0, 1.5, 1.0]) == [1.0, 1.0, 1.5, 1.0]
    assert straggler_scores([0.0, 0.0]) == [0.0, 0.0]


def test_restarts_without_a_checkpoint_count_too(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_RESTART_COUNT": "4", "TORCHELASTIC_RESTART_COUNT": "3"}.items():
        monkeypatch.setenv(name, value)
    monitor.on_train_start(_state())
    assert monitor.served is not None
    assert monitor.served.registry.get_sample_value("pipeline_training_restarts", {"run": "clicks"}) == 7


def test_rules_and_dashboard_name_metrics_that_there_are(monitor: Monitor) -> None:
    """The names are the registry's; promtool reads the rules where it is installed."""
    known = {metric.name for metric in monitor.served.registry.collect()}
    for file in ("training_alerts.yml", "training_dashboard.json"):
        assert set(re.findall(r"pipeline_training_[a-z_]+", (MONITORING / file).read_text())) <= known | {
            "pipeline_training"
        }
    json.loads((MONITORING / "training_dashboard.json").read_text())
    if shutil.which("promtool"):
        done = subprocess.run(
            ["promtool", "check", "rules", str(MONITORING / "training_alerts.yml")], capture_output=True, text=True
        )
        assert done.returncode == 0 and "7 rules found" in done.stdout, done.stderr


class Kept:
    """A tracker of the test's own; `open` lets its begin() go on, and a step from `fails_at` on fails."""

    def __init__(self, fails_at: int = 10**9) -> None:
        self.lines: list[tuple[str, int]] = []
        self.open, self.fails_at, self.ended = threading.Event(), fails_at, False

    def begin(self) -> None:
        self.open.wait(30)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        if step >= self.fails_at:
            raise ConnectionError("the server is away")
        self.lines.append((kind, step))

    def end(self) -> None:
        self.ended = True


def test_a_tracker_that_is_slow_holds_no_line_up_and_gets_all_of_them() -> None:
    tracker = Kept()
    forwarder = Forwarder("kept", tracker)
    for step in range(100):
        forwarder.write("train", step, {"ne": 0.5})
    assert tracker.lines == []  # and write() has returned a hundred times
    tracker.open.set()
    forwarder.close()
    assert tracker.lines == [("train", step) for step in range(100)] and tracker.ended


def test_a_tracker_that_is_away_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Kept(fails_at=2)
    tracker.open.set()
    forwarder = Forwarder("kept", tracker)
    for step in range(5):
        forwarder.write("train", step, {"ne": 0.5})
    forwarder.close()
    assert tracker.lines == [("train", 0), ("train", 1)]
    (record,) = (record for record in caplog.records if "tracker kept" in record.getMessage())
    assert "ConnectionError: the server is away" in record.getMessage()


def test_mlflow_gets_config_and_metrics_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking", reason="the extra `mlflow` is not installed")
    uri = f"file://{tmp_path}/mlruns"
    for step in (10, 20):
        parts = _parts(tmp_path)
        track = Track(_job(tmp_path, tracker="mlflow", tracker_uri=uri), parts)
        track.on_train_start(_state())
        parts.writer.write("train", step, {"ne": 1.0 / step, "undefined": "no"})
        track.close()
    client = tracking.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("clicks_data").experiment_id])
    assert (run.info.status, run.info.run_name, run.data.metrics) == ("FINISHED", "clicks", {"train/ne": 0.05})
    assert run.data.params["optimizer.sparse.name"] == "rowwise_adagrad"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/ne")] == [10, 20]


@pytest.mark.campaign
def test_wandb_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    parts = _parts(tmp_path)
    track = Track(_job(tmp_path, tracker="wandb"), parts)
    track.on_train_start(_state())
    parts.writer.write("train", 10, {"ne": 0.7})
    track.close()
    assert (
        list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        and json.loads((tmp_path / "tracker.json").read_text())["wandb"]
    )


def test_a_tracker_that_is_not_installed_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.extras.monitoring.hooks.tracker.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=names("logger.tracker=wandb torchrec-pipeline[wandb]")):
        Track(_job(tmp_path, tracker="wandb"), _parts(tmp_path))
    Track(_job(tmp_path), _parts(tmp_path))
    with pytest.raises(ConfigError, match=names("logger.tracker='aim'")):
        LoggerConfig(tracker="aim")


def test_a_log_of_json_has_an_object_a_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "13", "SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    before = logging.getLogger().handlers[:]
    configure_logging(0, "json")
    said = 'a "quoted"\nline of %s'
    get_logger("pipeline.test").info(said, "s3://key:secret@bucket", extra=fields(event="resumed", step=9))
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        get_logger("pipeline.test").exception("failed")
    first, second = (json.loads(line) for line in capfd.readouterr().err.splitlines())
    logging.getLogger().handlers[:] = before
    assert (first["job"], first["attempt"], first["host"]) == ("13", "2.1", socket.gethostname())
    assert (first["event"], first["step"]) == ("resumed", 9) and "event" not in second
    assert (first["level"], first["rank"], first["logger"]) == ("info", 0, "pipeline.test")
    assert 'a "quoted"\nline of' in first["message"] and "secret" not in first["message"]
    assert "ZeroDivisionError" in second["traceback"] and second["time"].endswith("+00:00")


def test_a_full_line_says_when_how_bad_and_whose(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "13", "SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    before = logging.getLogger().handlers[:]
    configure_logging(3, "full")
    get_logger("pipeline.test").warning("disk of %s is full", "node1")
    logging.getLogger().handlers[:] = before
    (line,) = capfd.readouterr().err.splitlines()
    pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} WARNING job=13 attempt=2\.1 rank=3 disk of node1 is full"
    assert re.fullmatch(pattern, line)


def test_at_the_end_a_prometheus_that_has_asked_twice_is_answered_once_more(monitor: Monitor) -> None:
    """Else its last values are of a training that was about to finish, and look like those of one that is gone."""
    state = _state(90)
    state.preempted = False
    monitor.on_train_start(state)
    monitor.on_fit_end(state)  # nobody asked: it waits for nobody
    monitor._set("finished", 0)
    assert monitor.served.scrapes is not None
    url = f"http://localhost:{monitor.served.server.server_port}/metrics"
    for _ in range(2):
        urllib.request.urlopen(url, timeout=10).read()
    monitor.served.scrapes._times = [time.monotonic() - 60.0, time.monotonic()]  # it comes once a minute
    heard: list[str] = []
    third = threading.Timer(0.05, lambda: heard.append(urllib.request.urlopen(url, timeout=10).read().decode()))
    third.start()
    monitor.on_fit_end(state)
    third.join()
    assert 'pipeline_training_finished{run="clicks"} 1.0' in heard[0]


def _scores(rank: int) -> tuple[list[Any], list[Any]]:
    context, step = init_distributed(), {"step_seconds": 0.5}
    known, unknown = of_ranks(context, {**step, "comms_seconds": 0.2 - 0.1 * rank}), of_ranks(context, step)
    return [each["straggler_score"] for each in known], [each.get("straggler_score") for each in unknown]


def test_no_rank_gets_a_score_where_waits_are_not_known(ranks: RankPool) -> None:
    """As with NCCL: step times are equal there however slow a rank is."""
    known, unknown = ranks.run(2, _scores)[0]
    assert known == pytest.approx([0.3 / 0.35, 0.4 / 0.35]) and unknown == [None, None]
