"""Jobs on a real Slurm of two nodes: submitted, followed, requeued, resumed, cancelled, through torchx run and sbatch."""

from __future__ import annotations

import json
import re

import pytest

from tests.launch.launching import SAVED, SECRET, START_S, STEP, Launch


@pytest.mark.campaign
def test_a_job_of_torchx_is_followed_requeued_resumed_and_cancelled(launch: Launch) -> None:
    handle = launch.torchx(
        "run", "-s", "slurm", "-cfg", "time=30,comment=two words", "pipeline.train", "-j", "2x1", "--env", "A=1,2",
        "--", *launch.overrides, "trainer.max_steps=100000",
    ).split()[-1]  # fmt: skip
    job_id = handle.rpartition("/")[2]
    assert re.search("State: (PENDING|RUNNING)", launch.torchx("status", handle))
    launch.wait_for(job_id, STEP.pattern)
    assert "step 50/93000" in launch.torchx("log", handle)
    launch.cluster.ask("scontrol", "requeue", job_id)
    launch.wait_for(job_id, "the ranks ended with code 75")
    before, _, after = launch.output(job_id).partition("the ranks ended with code 75")
    saved = int(SAVED.findall(before)[-1])
    launch.wait_for(job_id, f"code 75[^$]*{STEP.pattern}")
    after = launch.output(job_id).partition("the ranks ended with code 75")[2]
    assert saved < int(STEP.findall(after)[0]) <= saved + 50
    status = launch.torchx("status", handle)
    assert "State: RUNNING" in status and "Num Restarts: 1" in status and "quickstart[1]:RUNNING" in status
    launch.torchx("cancel", handle)
    launch.cluster.wait_for_state(job_id, "CANCELLED")
    assert "State: CANCELLED" in launch.torchx("status", handle)
    assert re.search(rf"{handle}\s+CANCELLED", launch.torchx("list", "-s", "slurm"))
    logs = launch.folder / "run" / "logs"
    assert {path.name.split("_")[1] for path in logs.glob(f"{job_id}.0_*")} == {"node1", "node2"}
    assert (logs / "rank_0.stderr.log").read_text() != (logs / "rank_1.stderr.log").read_text()
    script = launch.cluster.ask("scontrol", "write", "batch_script", job_id, "-")
    assert "export A=1,2\n" in script
    assert SECRET not in script + launch.output(job_id)
    assert not [file for file in launch.folder.rglob("*.log") if SECRET in file.read_text(errors="replace")]


@pytest.mark.campaign
def test_a_rendered_script_saves_when_its_time_is_up_goes_on_and_ends(launch: Launch) -> None:
    script = launch.render("train", "-j", "2x1", "--time", "30", "--", *launch.overrides, "trainer.max_steps=400")  # fmt: skip
    assert "#SBATCH --signal=TERM@48\n" in script
    job_id = launch.sbatch(script)
    launch.wait_for(job_id, STEP.pattern)
    # What --signal=TERM@48 does 48 s before the limit: SIGTERM for the steps, none for the script.
    launch.cluster.ask("scancel", "--signal=TERM", job_id)
    launch.wait_for(job_id, "the ranks ended with code", times=2)
    assert launch.cluster.wait_for_state(job_id, "COMPLETED") == "COMPLETED"
    assert launch.cluster.job(job_id)["Restarts"] == "1"
    assert launch.trained_steps() == sorted(set(launch.trained_steps())) and launch.trained_steps()[-1] == 400
    assert re.findall("ended with code (.*)", launch.output(job_id)) == ["75", "0"]


def test_a_mistake_is_not_tried_again(launch: Launch) -> None:
    job_id = launch.sbatch(
        launch.render("plan", "--max-retries", "3", "--no-check-data", "--", *launch.overrides, "data.path=/nowhere")
    )
    launch.cluster.wait_for_state(job_id, "FAILED", timeout_s=START_S)
    job = launch.cluster.job(job_id)
    assert (job["ExitCode"], job["Restarts"]) == ("2:0", "0")
    assert len(re.findall(r"(?m)^error: .*/nowhere", launch.output(job_id))) == 1


@pytest.mark.campaign
def test_what_slurm_refuses_is_one_line(launch: Launch) -> None:
    train = ["pipeline.train", "-j", "2x1", "--", *launch.overrides]
    refused = launch.torchx("run", "-s", "slurm", "-cfg", "partition=nope", *train, code=2)
    assert refused.startswith("error: Slurm refused: sbatch: error: invalid partition specified: nope")
    assert "did you mean 'partition'?" in launch.torchx("run", "-s", "slurm", "-cfg", "partion=x", *train, code=2)
    for command in ("log", "cancel"):
        assert "knows no such job" in launch.torchx(command, "slurm://torchx/99999", code=2)


@pytest.mark.campaign
def test_the_links_between_two_nodes_are_measured_before_a_long_run(launch: Launch) -> None:
    words = [f"folder={launch.folder}", f"output={launch.folder}/nodes.json", "megabytes=8"]
    job_id = launch.sbatch(launch.render("check_nodes", "-j", "2x1", "--gpu", "0", "--", *words))
    assert launch.cluster.wait_for_state(job_id, "COMPLETED", timeout_s=START_S) == "COMPLETED", launch.output(job_id)
    told, found = launch.output(job_id), json.loads((launch.folder / "nodes.json").read_text())
    assert "2 node(s), 2 rank(s), gloo" in told and "all is well" in told
    assert [facts["host"] for facts in found["nodes"].values()] == ["node1", "node2"]
    assert [(link["source"], link["target"]) for link in found["links"]] == [(0, 1), (1, 0)]
    assert all(link["bytes_per_s"] > 0 for link in found["links"]) and found["problems"] == []
    job_id = launch.sbatch(
        launch.render("check_nodes", "-j", "2x1", "--gpu", "0", "--", "folder=/nowhere", "megabytes=1")
    )
    launch.cluster.wait_for_state(job_id, "FAILED", timeout_s=START_S)
    assert launch.cluster.job(job_id)["ExitCode"] == "2:0" and "FAIL /nowhere" in launch.output(job_id)
