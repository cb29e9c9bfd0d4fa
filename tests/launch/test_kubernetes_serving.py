"""Manifests of a server hold against Kubernetes' schemas, and say what the server itself does."""

from __future__ import annotations

from typing import Any

import pytest

from launch.render import render
from tests.launch.manifests import NAME, _against_releases, as_pod, read
from tests.support.messages import mentions

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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 3"),
        (["--queue", "team"], "--queue"),
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
