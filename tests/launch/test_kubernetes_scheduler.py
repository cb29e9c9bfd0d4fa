"""`torchx run -s kubernetes` submits what launch.render prints for Volcano, and needs no docker and no cluster to show it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import mentions
from tests.support.torchx_commands import Answer, answers_of, words_for

pytest.importorskip("kubernetes", reason="pip install 'torchrec-pipeline[kubernetes]'")
import yaml
from torchx.specs.builders import materialize_appdef

from launch import components
from launch.extras.volcano_scheduler import KubernetesScheduler, create_scheduler
from pipeline.extras.sweep.launchers import Ended, SchedulerJobs, Training
from tests.launch.manifests import assert_valid, pod_templates, read

PLACE = ["--image", "ours:1", "--cpu", "8", "--memMB", "16000"]
NO_DATA = ["--check_data", "False", "--"]
COMPONENTS = {
    "prepare": ["--", "data=criteo_kaggle", "source=/data/raw/*.gz"],
    "plan": [*NO_DATA, "experiment=mlperf_dlrmv2", "hardware=h200", "world_size=8"],
    "train": ["-j", "2x8", "--gpu", "8", *NO_DATA, "experiment=mlperf_dlrmv2", "data.path=/data"],
    "evaluate": ["-j", "1x8", "--gpu", "8", *NO_DATA, "run=/workspace/runs/mlperf", "split=validation"],
    "export": [*NO_DATA, "run=/workspace/runs/mlperf"],
    "predict": ["--", "artifact=/a", "source=/rows", "output=/workspace/scores.parquet"],
    "retrain": ["-j", "1x8", "--gpu", "8", *NO_DATA, "experiment=criteo_kaggle_dlrm", "source=clicks"],
}


def _scheduler() -> KubernetesScheduler:
    return create_scheduler("test")


def _request(argv: list[str], verb: str = "train", **cfg: Any) -> tuple[dict[str, Any], str]:
    """The manifest that TorchX submits, and as it is shown."""
    app = materialize_appdef(getattr(components, verb), argv)
    scheduler = _scheduler()
    for role in app.roles:
        scheduler.build_workspace_and_update_role(role, "file://.", cfg)  # asks no docker daemon
    shown = scheduler.submit_dryrun(app, cfg)
    return shown.request.resource, str(shown)


@pytest.mark.parametrize("verb", COMPONENTS)
def test_every_component_becomes_a_job_of_volcano(verb: str) -> None:
    resource, shown = _request([*PLACE, *COMPONENTS[verb]], verb)
    assert read(shown) == [resource]
    assert_valid(resource)
    words = COMPONENTS[verb][COMPONENTS[verb].index("--") + 1 :]
    for template in pod_templates(resource):
        assert template["spec"]["containers"][0]["command"][-len(words) :] == words


def test_options_of_the_command_line_reach_the_manifest() -> None:
    cfg = {"queue": "ads", "namespace": "team", "service_account": "trainer", "secret": "s3-keys", "grace_s": 90}
    resource, _ = _request([*PLACE, "--max_retries", "4", *COMPONENTS["train"]], **cfg)
    assert (resource["metadata"]["namespace"], resource["spec"]["queue"], resource["spec"]["maxRetry"]) == ("team", "ads", 4)  # fmt: skip
    spec = pod_templates(resource)[0]["spec"]
    assert (spec["serviceAccountName"], spec["terminationGracePeriodSeconds"]) == ("trainer", 90)
    assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]


def test_a_long_name_leaves_room_for_what_torchx_and_volcano_add() -> None:
    resource, _ = _request([*PLACE, "--name", "x" * 50, *COMPONENTS["train"]])
    name = resource["metadata"]["name"]
    assert len(f"{name}-train-1-0") <= 63
    assert name != _request([*PLACE, "--name", "x" * 50, *COMPONENTS["train"]])[0]["metadata"]["name"]


def _torchx(*commands: list[str], installed: dict[str, str], folder: Path) -> list[Answer]:
    """As a person types them, where there is neither docker nor a kubeconfig."""
    environ = {**os.environ, **installed, "HOME": str(folder), "DOCKER_HOST": f"unix://{folder}/no-docker"}
    environ.pop("KUBECONFIG", None)
    words = words_for(*(["--log_level", "WARNING", *command] for command in commands))
    return answers_of(
        subprocess.run(
            [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    )


@pytest.mark.long
def test_a_dry_run_needs_no_docker_and_no_cluster_and_a_run_without_one_ends_with_a_line(
    installed: dict[str, str], tmp_path: Path
) -> None:
    run, job = ["run", "-s", "kubernetes"], ["pipeline.train", *PLACE, *COMPONENTS["train"]]
    shown, refused = _torchx([*run, "--dryrun", *job], [*run, *job], installed=installed, folder=tmp_path)
    assert shown.code == 0 and mentions(shown.err, "data.path=") and len(shown.err.splitlines()) == 1
    assert_valid(yaml.safe_load(shown.out.partition("=== SCHEDULER REQUEST ===")[2]))
    assert refused.code == 2 and "Traceback" not in refused.err
    assert mentions(refused.err.splitlines()[-1], "error: ")


class _Runner:
    """TorchX's, for a cluster that is asked for nothing: what would be submitted is kept."""

    def __init__(self) -> None:
        self.resources: list[dict[str, Any]] = []

    def scheduler_backends(self) -> list[str]:
        return ["kubernetes"]

    def scheduler_run_opts(self, scheduler: str) -> Any:
        return _scheduler().run_opts()

    def run_component(self, component: str, words: list[str], scheduler: str, settings: dict[str, Any]) -> str:
        assert component == "pipeline.train"
        self.resources.append(_request(words, **settings)[0])
        return f"kubernetes://torchx/default:job-{len(self.resources)}"

    def status(self, handle: str) -> None:
        return None


def test_a_trial_of_a_sweep_is_a_job_of_volcano(tmp_path: Path) -> None:
    runner = _Runner()
    jobs = SchedulerJobs(
        "kubernetes", {"namespace": "team", "queue": "ads"}, [*PLACE, "-j", "1x2", "--gpu", "2", "--check_data", "False"], "rates", runner
    )  # fmt: skip
    words = [
        "experiment=mlperf_dlrmv2",
        "data.path=/data",
        "optimizer.sparse.lr=0.004",
        f"run_dir={tmp_path}/trials/0007",
    ]
    ended = asyncio.run(jobs.run(Training(f"{tmp_path}/trials/0007", words)))
    assert ended == Ended("kubernetes://torchx/default:job-1 is no longer known")
    (resource,) = runner.resources
    assert_valid(resource)
    assert resource["metadata"]["namespace"] == "team" and resource["metadata"]["name"].startswith("rates-0007")
    assert pod_templates(resource)[0]["spec"]["containers"][0]["command"][-len(words) :] == words
    assert (tmp_path / "trials/0007.job").read_text() == "kubernetes://torchx/default:job-1\n"
