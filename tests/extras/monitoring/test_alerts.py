"""Alert rules fire when they should and not before, by Prometheus' own tools; a real Prometheus reads what a training serves.

[PROMTOOL=/path/promtool] pytest tests/extras/monitoring/test_alerts.py
[PROMETHEUS=/path/prometheus] pytest -m campaign -s tests/extras/monitoring/test_alerts.py

Neither comes with Python packages: the tests skip where the variable names none and the PATH has none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pipeline.config.jobs.train import TrainJob
from pipeline.config.training import LoggerConfig, TrainerConfig
from pipeline.extras.monitoring.hooks.monitor import Monitor
from pipeline.runtime.logs import MetricsWriter
from pipeline.serving.http.batching import ServerMetrics

MONITORING = Path(__file__).resolve().parents[3] / "launch" / "monitoring"
ALERTS = MONITORING / "training_alerts.yml"


def _binary(name: str) -> str:
    found = os.environ.get(name.upper()) or shutil.which(name)
    if not found:
        pytest.skip(f"no {name}: {name.upper()} names none and the PATH has none")
    return found


@pytest.mark.parametrize("rules", ["training_alerts", "serving_alerts"])
def test_every_alert_fires_when_it_should_and_not_before(tmp_path: Path, rules: str) -> None:
    promtool = _binary("promtool")
    for file in (MONITORING / f"{rules}.yml", Path(__file__).with_name(f"{rules}_test.yml")):
        shutil.copy(file, tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", f"{rules}_test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rules", ["training_alerts", "serving_alerts"])
def test_every_alert_has_a_test_of_promtools(rules: str) -> None:
    tests = yaml.safe_load(Path(__file__).with_name(f"{rules}_test.yml").read_text())["tests"]
    tested = {each["alertname"] for test in tests for each in test.get("alert_rule_test", []) if each["exp_alerts"]}
    groups = yaml.safe_load((MONITORING / f"{rules}.yml").read_text())["groups"]
    assert tested == {rule["alert"] for rule in groups[0]["rules"]}


class Prometheus:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer. Raises OSError for a refusal."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float | None:
        found = self.get("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def wait(self, what: Callable[[], Any]) -> None:
        until = time.monotonic() + 120
        while not what():
            assert time.monotonic() < until
            time.sleep(0.2)


@contextmanager
def _prometheus(folder: Path, ports: list[int], *flags: str) -> Iterator[Prometheus]:
    """A server that asks localhost's `ports` each second, and knows the rules."""
    (folder / "prometheus").mkdir()
    targets = [f"localhost:{port}" for port in ports]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [{"job_name": "training", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus", *flags]
    with open(folder / "prometheus.log", "w") as log:
        process = subprocess.Popen(
            [_binary("prometheus"), *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    made = Prometheus(port)

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        try:
            return urllib.request.urlopen(f"{made.url}/-/ready", timeout=5).status == 200
        except (OSError, urllib.error.URLError):
            return False

    try:
        made.wait(is_ready)
        yield made
    finally:
        process.terminate()
        process.wait(60)


def _training(folder: Path, port: int | None, **logger: Any) -> tuple[Monitor, Any]:
    """A hook as a training has it, after step 20; six starts came before."""
    start = {
        "time": "2026-01-01T00:00:00+00:00",
        "from_step": 0,
        "command": "c",
        "host": "h",
        "world_size": 2,
        "version": "1",
        "commit": "",
    }
    starts = [json.dumps({**start, "from_step": step}) for step in range(0, 70, 10)]
    (folder / "starts.jsonl").write_text("\n".join(starts) + "\n")
    job = TrainJob(
        name="clicks",
        run_dir=str(folder),
        trainer=TrainerConfig(metrics_port=port),
        logger=LoggerConfig(**logger),
    )
    parts: Any = SimpleNamespace(writer=MetricsWriter(str(folder), tensorboard=False))
    monitor = Monitor(job, parts)
    state: Any = SimpleNamespace(step=10, saved_step=0, total_steps=90, of_ranks=[], preempted=False)
    monitor.on_train_start(state)
    parts.writer.write("train", 20, {"ne": 0.75, "input_stall_percent": 2.5})
    parts.writer.write("validation", 20, {"ne": 0.8, "calibration": 1.5})
    state.step, state.of_ranks = 20, [{"step_seconds": 0.5, "straggler_score": score} for score in (1.0, 1.75)]
    monitor.on_step_end(state)
    return monitor, state


@pytest.mark.campaign
def test_a_real_prometheus_reads_a_training_fires_its_alerts_and_hears_its_end(tmp_path: Path) -> None:
    monitor, state = _training(tmp_path, 0)
    assert monitor.served is not None
    with _prometheus(tmp_path, [monitor.served.server.server_port]) as prometheus:
        prometheus.wait(lambda: prometheus.value("pipeline_training_step") == 20)
        assert prometheus.value('pipeline_training_rank{rank="1",name="straggler_score"}') == 1.75
        firing = {"TrainingRestartsAgainAndAgain", "TrainingPredictionsAreOff"}  # those that wait for nothing
        prometheus.wait(
            lambda: (
                {
                    each["labels"]["alertname"]
                    for each in prometheus.get("alerts")["alerts"]
                    if each["state"] == "firing"
                }
                == firing
            )
        )
        (group,) = prometheus.get("rules")["groups"]
        assert [(rule["health"], rule.get("lastError")) for rule in group["rules"]] == [("ok", None)] * 7
        charts = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', (MONITORING / "training_dashboard.json").read_text())
        for chart in charts:
            expression = json.loads(f'"{chart}"').replace("$__rate_interval", "1m").replace("$run", ".*")
            found = prometheus.get("query", query=expression)["result"]  # a wrong expression raises
            assert found or "pipeline_training_metric" in expression, expression
        prometheus.wait(lambda: (prometheus.value("count_over_time(pipeline_training_step[1h])") or 0) > 3)
        state.step = 90
        monitor.on_step_end(state)
        monitor.on_fit_end(state)
        monitor.close()
        prometheus.wait(lambda: prometheus.value("last_over_time(pipeline_training_finished[1h])") == 1)
        assert prometheus.value("last_over_time(pipeline_training_step[1h])") == 90
        print(f"{len(charts)} charts, {len(group['rules'])} rules")


@pytest.mark.campaign
def test_a_real_prometheus_takes_the_same_gauges_by_otlp(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otlp` is not installed")
    if "otlp" not in subprocess.run([_binary("prometheus"), "--help"], capture_output=True, text=True).stdout:
        pytest.skip("this Prometheus takes no OTLP")
    with _prometheus(tmp_path, [], "--web.enable-otlp-receiver") as prometheus:
        endpoint = f"{prometheus.url}/api/v1/otlp"
        monitor, state = _training(tmp_path, None, otlp_endpoint=endpoint, otlp_every_s=1.0)
        monitor.on_fit_end(state)
        monitor.close()
        prometheus.wait(lambda: prometheus.value("pipeline_training_finished") == 1)
        assert prometheus.value('pipeline_training_rank{rank="1",name="straggler_score"}') == 1.75


@pytest.mark.campaign
def test_a_real_prometheus_answers_what_the_autoscaler_asks(tmp_path: Path) -> None:
    """The adapter's query, filled in as prometheus-adapter does it, over what a server counts."""
    from prometheus_client import start_http_server

    metrics = ServerMetrics()
    served, _ = start_http_server(0, registry=metrics.registry)
    (rule,) = yaml.safe_load((MONITORING / "prometheus_adapter.yml").read_text())["rules"]
    query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'job="training"').replace("<<.GroupBy>>", "job")
    query = query.replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
    with _prometheus(tmp_path, [served.server_port]) as prometheus:

        def answered() -> float | None:
            metrics.request_seconds.labels("/score").observe(0.015)
            value = prometheus.value(query)
            return value if value == value else None  # NaN until there are two samples

        prometheus.wait(answered)
        value = answered()
        assert value is not None and 0.0 < value <= 0.05
        print(f"95th percentile: {value:.4f} s")
    served.shutdown()
