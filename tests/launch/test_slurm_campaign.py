"""What clusters do to jobs, on a real Slurm: a node is lost, the time is up, somebody more urgent comes, ranks fail."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launch.launching import SAVED, START_S, STEP, Launch
from tests.launch.slurm_cluster import cluster, wait_until, why_not

pytestmark = pytest.mark.campaign
LONG = ("trainer.max_steps=100000",)
ENDED = "the ranks ended with code"


def _submit(launch: Launch, *flags: str, words: tuple[str, ...] = LONG) -> str:
    job_id = launch.sbatch(launch.render("train", "-j", "2x1", *flags, "--", *launch.overrides, *words))
    launch.wait_for(job_id, STEP.pattern)
    return job_id


def _first_step_after(launch: Launch, job_id: str, mark: str) -> int:
    launch.wait_for(job_id, f"(?s){mark}.*{STEP.pattern}")
    return int(STEP.findall(launch.output(job_id).rpartition(mark)[2])[0])


def test_a_lost_node_costs_what_was_not_saved(launch: Launch) -> None:
    job_id = _submit(launch, words=(*LONG, "checkpoint.save_every_steps=100"))
    launch.wait_for(job_id, SAVED.pattern)
    launch.cluster.hosts["node2"].cut_power()
    launch.cluster.wait_for_state(job_id, "PENDING", timeout_s=90)
    saved = int(SAVED.findall(launch.output(job_id))[-1])
    launch.cluster.start_node("node2")
    assert saved < _first_step_after(launch, job_id, "NODE FAILURE") <= saved + 50
    assert launch.cluster.job(job_id)["Restarts"] == "1"
    launch.torchx("cancel", f"slurm://torchx/{job_id}")


def test_a_time_limit_saves_and_requeues(launch: Launch) -> None:
    # Slurm may send the signal up to a minute early.
    job_id = _submit(launch, "--time", "2", "--signal", "TERM@45")
    launch.wait_for(job_id, f"{ENDED} 75")  # a job that Slurm ends by its limit has no such code
    saved = int(SAVED.findall(launch.output(job_id))[-1])
    assert saved < _first_step_after(launch, job_id, f"{ENDED} 75") <= saved + 50
    launch.torchx("cancel", f"slurm://torchx/{job_id}")


def test_an_urgent_job_pre_empts_and_the_run_goes_on_behind_it(launch: Launch) -> None:
    job_id = _submit(launch)
    urgent = launch.cluster.ask(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 5"
    )
    launch.wait_for(job_id, f"{ENDED} 75")
    launch.cluster.wait_for_state(urgent, "COMPLETED", timeout_s=90)
    saved = int(SAVED.findall(launch.output(job_id))[-1])
    assert saved < _first_step_after(launch, job_id, f"{ENDED} 75") <= saved + 50
    launch.torchx("cancel", f"slurm://torchx/{job_id}")


def test_failures_are_tried_again_as_often_as_allowed(launch: Launch) -> None:
    (launch.folder / "broken").mkdir()
    (launch.folder / "broken" / "sitecustomize.py").write_text("import os, sys\nif 'RANK' in os.environ: os._exit(9)\n")
    script = launch.render("train", "-j", "2x1", "--max-restarts", "0", "--max-retries", "2", "--", *launch.overrides)
    job_id = launch.sbatch(script.replace("export PYTHONPATH=", f"export PYTHONPATH={launch.folder}/broken:"))
    launch.wait_for(job_id, ENDED, times=3)
    launch.cluster.wait_for_state(job_id, "FAILED", timeout_s=START_S)
    assert launch.cluster.job(job_id)["Restarts"] == "2"
    assert re.findall(f"{ENDED} (.*)", launch.output(job_id)) == ["9", "9", "9"]


def test_every_component_runs_on_slurm(launch: Launch, tmp_path: Path) -> None:
    """Each through `torchx run -s slurm --wait`: raw rows to a data set, a plan, a run, an evaluation, an artifact."""
    raw = str(tmp_path / "raw.tsv")
    launch.says(
        *launch.python("-m", "pipeline", "generate"), "data=quickstart", f"output={raw}", "data.synthetic.num_rows=8000"
    )
    data, run = f"data.path={tmp_path}/set", f"run_dir={tmp_path}/small"
    train = ["experiment=quickstart", "hardware=cpu", "hardware.ranks_per_host=1", data, run, *launch.overrides[5:8], "trainer.max_steps=10"]  # fmt: skip
    (tmp_path / "windows" / "dt=2099-01-01").mkdir(parents=True)
    (tmp_path / "windows" / "dt=2099-01-01" / "part.tsv").touch()
    retrained = [
        f"source={tmp_path}/windows",
        f"run_dir={tmp_path}/retrained",
        f"registry.path={tmp_path}/registry",
        data,
    ]
    for verb, words in (
        ("prepare", ["data=quickstart", f"source={raw}", data]),
        ("plan", [*train, "world_size=2"]),
        ("train", ["-j", "2x1", "--", *train, "planner=file"]),
        ("evaluate", ["-j", "2x1", "--", f"run={tmp_path}/small", "max_batches=2"]),
        ("export", [f"run={tmp_path}/small"]),
        (
            "retrain",
            ["-j", "2x1", "--", "experiment=quickstart", "hardware=cpu", *retrained],
        ),  # a tick that waits for its window
    ):
        words = words if "--" in words else ["--", *words]
        launch.torchx("run", "-s", "slurm", "--wait", f"pipeline.{verb}", *words)
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())
    assert list((tmp_path / "small").glob("evaluation.test.*.json"))
    assert list((tmp_path / "small" / "artifacts").glob("*/manifest.json"))


def test_a_job_that_slurmctld_has_forgotten_is_asked_of_accounting(
    tmp_path: Path, installed: dict[str, str], prepared_clicks: str
) -> None:
    if reason := why_not(accounting=True):
        pytest.skip(reason)
    with cluster(num_nodes=1, accounting=True) as accounted:
        launch = Launch(accounted, tmp_path, installed, prepared_clicks)
        words = ["--", *launch.overrides, "data.path=/nowhere"]
        failed = launch.torchx("run", "-s", "slurm", "pipeline.plan", "--check_data", "False", *words).split()[-1]
        job_id = failed.rpartition("/")[2]
        wait_until(
            lambda: "Invalid job id" in accounted.run(["scontrol", "show", "job", job_id]).stderr,
            "forgotten job",
            START_S,
        )
        assert "State: FAILED" in launch.torchx("status", failed)
        assert re.search(rf"{failed}\s+FAILED", launch.torchx("list", "-s", "slurm"))
        assert "error: " in launch.torchx("log", failed)
