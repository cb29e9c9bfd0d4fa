"""Manifests of a server hold against Kubernetes' schemas, and say what the server itself does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launch.render import render
from pipeline.serving.http.batching import ServerMetrics
from tests.launch.manifests import NAME, _against_releases, as_pod, assert_valid, read
from tests.support.messages import mentions

MONITORING = Path(__file__).resolve().parents[2] / "launch" / "monitoring"
PLACE = ["--image", "ours:1", "--cpu", "4", "--memMB", "16000"]


def _objects(*flags: str, words: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    text = render("serving", ["serve", *PLACE, *flags, "--", "artifact=/registry/clicks", *words])
    return {each["kind"]: each for each in read(text)}


def test_a_server_is_a_deployment_behind_a_service_that_holds_against_the_schemas() -> None:
    found = _objects(
        "--replicas", "3", "--max-replicas", "9", "--mount", "type=volume,src=registry,dst=/registry,readonly"
    )
    assert list(found) == ["Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler"]
    for manifest in found.values():
        _against_releases(manifest)
        assert NAME.fullmatch(manifest["metadata"]["name"])
    template = found["Deployment"]["spec"]["template"]
    _against_releases(as_pod(template))
    labels = found["Deployment"]["spec"]["selector"]["matchLabels"]
    assert labels.items() <= template["metadata"]["labels"].items()
    assert (
        labels
        == found["Service"]["spec"]["selector"]
        == found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    )
    assert "replicas" not in found["Deployment"]["spec"]  # the autoscaler's to say
    scaled = found["HorizontalPodAutoscaler"]["spec"]
    assert (scaled["minReplicas"], scaled["maxReplicas"]) == (3, 9)
    assert scaled["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]


def test_a_server_is_scaled_by_latency_and_found_by_prometheus() -> None:
    found = _objects(
        "--max-replicas", "9", "--latency-ms", "20", "--monitor", "--scrape-s", "5", "--label", "release=prom"
    )
    cpu, latency = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert (cpu["type"], latency["type"], latency["pods"]["target"]["averageValue"]) == ("Resource", "Pods", "20m")
    _against_releases(found["HorizontalPodAutoscaler"])
    monitor, service = found["ServiceMonitor"], found["Service"]
    assert_valid(monitor)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"] and endpoint["interval"] == "5s"
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert "annotations" not in found["Deployment"]["spec"]["template"]["metadata"]  # one way to be found is enough
    monitor["spec"]["endpoints"][0]["intervall"] = "5s"
    with pytest.raises(jsonschema.ValidationError):
        assert_valid(monitor)


def test_the_adapter_makes_the_latency_of_what_the_server_counts() -> None:
    """Of the histogram that /metrics has, under the name that the autoscaler asks for."""
    (rule,) = yaml.safe_load((MONITORING / "prometheus_adapter.yml").read_text())["rules"]
    found = _objects("--max-replicas", "9", "--latency-ms", "20")
    asked = found["HorizontalPodAutoscaler"]["spec"]["metrics"][1]["pods"]["metric"]["name"]
    assert rule["name"]["as"] == asked
    metrics = ServerMetrics()
    metrics.request_seconds.labels("/score").observe(0.01)
    samples = {sample.name for metric in metrics.registry.collect() for sample in metric.samples}
    assert rule["seriesQuery"].partition("{")[0] in samples
    assert {"<<.Series>>", "<<.LabelMatchers>>", "<<.GroupBy>>"} <= set(re.findall("<<[^>]*>>", rule["metricsQuery"]))


def test_pods_listen_are_asked_whether_they_are_ready_and_answer_while_they_are_taken_away() -> None:
    found = _objects(words=("server.port=8123", "server.drain_s=40"))
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"][-6:] == [
        "artifact=/registry/clicks", "server.port=8123", "server.drain_s=40", "server.host=0.0.0.0", "server.shutdown_delay_s=5",
        "threads=4",
    ]  # fmt: skip
    assert spec["terminationGracePeriodSeconds"] == 50 and spec["restartPolicy"] == "Always"
    assert container["ports"] == [{"name": "http", "containerPort": 8123}]
    for probe, path in (
        ("startupProbe", "/health/ready"),
        ("readinessProbe", "/health/ready"),
        ("livenessProbe", "/health/live"),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 600
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    assert found["Deployment"]["spec"]["replicas"] == 2 and "HorizontalPodAutoscaler" not in found
    assert "PodDisruptionBudget" not in _objects("--replicas", "1")  # it would hold up every drain of a node


def test_what_pods_read_and_no_volume_brings_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Pods of a server without its artifact can never become ready."""
    mount = ["--mount", "type=volume,src=registry,dst=/workspace"]
    words = ["--", "artifact=artifacts/clicks"]
    text = render("serving", ["serve", *PLACE, *words])
    (warning,) = capsys.readouterr().err.splitlines()
    assert mentions(warning, "WARNING artifacts/clicks /workspace") and f"# {warning}\n" in text
    for flags in ([*mount, *words], ["--", "artifact=/models/clicks"], ["--", "artifact=s3://bucket/clicks"]):
        assert "WARNING" not in render("serving", ["serve", *PLACE, *flags]) and capsys.readouterr().err == ""
    for verb, reads in (
        ("predict", ["artifact=a", "source=rows/", "output=/o.parquet"]),
        ("export", ["run=runs/a"]),
        ("prepare", ["data=quickstart", "source=raw.tsv"]),
    ):
        text = render("kubernetes", [verb, *PLACE, "--no-check-data", "--", *reads])
        assert text.count("WARNING") == (2 if verb == "predict" else 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 3"),
        (["--queue", "team"], "--queue"),
        (["--latency-ms", "20"], "--latency-ms 20 --max-replicas"),
        (["--attempt", "auto"], "--attempt"),
        (["--service-port", "0"], "--service-port"),
        (["-j", "2x1"], "2x1"),
    ],
)
def test_what_a_server_cannot_have_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        _objects(*flags)
    assert stop.value.code == 2 and mentions(capsys.readouterr().err, message)
