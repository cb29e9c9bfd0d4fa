"""Chains and arrays on a real Slurm of two nodes: raw rows to a server in five jobs, four trainings at once, shares of a prediction."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.extras.runs.folder import open_run
from tests.launch.launching import START_S, Launch
from tests.launch.slurm_cluster import wait_until

pytestmark = pytest.mark.campaign
STAGES = ["prepare", "plan", "train", "export", "serve"]
PORT = 8123


def _raw_rows(launch: Launch, rows: int = 8000) -> Path:
    raw = launch.folder / "raw.tsv"
    launch.says(
        *launch.python("-m", "pipeline", "generate"),
        "data=quickstart",
        f"output={raw}",
        f"data.synthetic.num_rows={rows}",
    )
    return raw


def _chain(launch: Launch, raw: Path) -> Path:
    folder = launch.folder
    data, run = f"data.path={folder}/set", f"run_dir={folder}/run"
    job = ["experiment=quickstart", "hardware=cpu", "hardware.ranks_per_host=1", data, run, "trainer.max_steps=20",
           "trainer.global_batch_size=256", "trainer.evaluate_batch_size=512", f"planner.plan_file={folder}/plan.json"]  # fmt: skip
    values = {
        "name": "clicks",
        "defaults": {"env": {"PYTHONPATH": launch.env["PYTHONPATH"], "OMP_NUM_THREADS": "1"}},
        "stages": {
            "prepare": {"overrides": ["data=quickstart", f"source={raw}", data]},
            "plan": {"overrides": [*job, "world_size=2"]},
            "train": {"j": "2x1", "cpu": 4, "overrides": [*job, "planner=file"]},
            "export": {"overrides": [f"run={folder}/run", f"output={folder}/artifact"]},
            "serve": {"overrides": [f"artifact={folder}/artifact", f"server.port={PORT}"]},
        },
    }
    file = folder / "chain.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def _submit(launch: Launch, file: Path) -> dict[str, str]:
    """Stage -> job id."""
    script = launch.folder / "chain.sh"
    render = launch.python("-m", "launch.render", "chain", "slurm", str(file))
    script.write_text(
        launch.cluster.run(render, launch.folder, launch.env).stdout
    )  # what is said of unseen data goes to stderr
    return dict(line.split() for line in launch.says("bash", str(script)).splitlines())


def _ready(launch: Launch, node: str) -> bool:
    """Asked on the node, which has a network of its own."""
    code = f"import urllib.request; print(urllib.request.urlopen('http://localhost:{PORT}/health/ready', timeout=5).status)"
    host = launch.cluster.hosts[node]
    done = subprocess.run(host.command(sys.executable, "-c", code), capture_output=True, text=True)
    return done.stdout.strip() == "200"


def test_raw_rows_become_a_server_by_one_script_and_files_are_scored_by_an_array(launch: Launch) -> None:
    raw = _raw_rows(launch)
    jobs = _submit(launch, _chain(launch, raw))
    assert list(jobs) == STAGES
    assert {launch.cluster.job(jobs[stage])["Reason"] for stage in STAGES[1:]} <= {"Dependency"}
    for stage in STAGES[:-1]:
        state = launch.cluster.wait_for_state(jobs[stage], "COMPLETED", "FAILED", "CANCELLED", timeout_s=START_S)
        assert state == "COMPLETED", (stage, launch.output(jobs[stage]))
    launch.cluster.wait_for_state(jobs["serve"], "RUNNING", timeout_s=START_S)
    node = launch.cluster.job(jobs["serve"])["NodeList"]
    wait_until(lambda: _ready(launch, node), f"server on {node}", START_S)
    times = [launch.cluster.job(jobs[stage]) for stage in STAGES]
    assert all(before["EndTime"] <= after["StartTime"] for before, after in pairwise(times))
    launch.cluster.ask("scancel", jobs["serve"])
    _predict_by_an_array(launch, raw)


def _predict_by_an_array(launch: Launch, raw: Path) -> None:
    lines = raw.read_text().splitlines(keepends=True)
    rows = launch.folder / "rows"
    rows.mkdir()
    for number in range(7):
        (rows / f"part-{number}.tsv").write_text("".join(lines[number * 500 : (number + 1) * 500]))
    words = [f"artifact={launch.folder}/artifact", f"source={rows}"]
    whole = launch.folder / "whole.parquet"
    launch.says(*launch.python("-m", "pipeline", "predict"), *words, f"output={whole}")
    shared = launch.folder / "shared.parquet"
    handle = launch.torchx(
        "run", "-s", "slurm", "pipeline.predict", "--cpu", "2", "--", *words, f"output={shared}", "num_shards=4"
    )
    job_id = handle.split()[-1].rpartition("/")[2]
    wait_until(lambda: Path(f"{shared}.manifest.json").exists(), "manifest of all shards", START_S)
    for task in range(4):
        launch.cluster.wait_for_state(f"{job_id}_{task}", "COMPLETED")
    shards = sorted(launch.folder.glob("shared.shard-*.parquet"))
    assert len(shards) == 4
    assert pa.concat_tables([pq.read_table(shard) for shard in shards]).equals(pq.read_table(whole))
    assert pq.read_table(whole).num_rows == 3500 and json.loads(Path(f"{shared}.manifest.json").read_text())


def test_a_stage_that_fails_takes_those_behind_it_out_of_the_queue(launch: Launch) -> None:
    jobs = _submit(launch, _chain(launch, launch.folder / "nowhere.tsv"))
    assert launch.cluster.wait_for_state(jobs["prepare"], "FAILED", timeout_s=START_S) == "FAILED"
    assert launch.cluster.job(jobs["prepare"])["ExitCode"] == "2:0"
    for stage in STAGES[1:]:
        launch.cluster.wait_for_state(jobs[stage], "CANCELLED")
    assert not (launch.folder / "set").exists() and not (launch.folder / "run").exists()


def test_an_array_of_four_trainings_is_listed_read_and_cancelled_by_task(launch: Launch) -> None:
    task = "${oc.env:SLURM_ARRAY_TASK_ID,0}"
    shared = [word for word in launch.overrides if not word.startswith("run_dir=")]
    words = [*shared, f'run_dir="{launch.folder}/task{task}"', f'trainer.seed="${{oc.decode:{task}}}"']
    flags = ["-j", "1x1", "--cpu", "2", "--", *words]
    run = ["run", "-s", "slurm", "-cfg", "array=0-3", "pipeline.train", *flags]
    job_id = launch.torchx(*run, "trainer.max_steps=20").split()[-1].rpartition("/")[2]
    for number in range(4):
        launch.cluster.wait_for_state(f"{job_id}_{number}", "COMPLETED", timeout_s=2 * START_S)
    assert {open_run(f"{launch.folder}/task{number}").config["trainer"]["seed"] for number in range(4)} == {0, 1, 2, 3}
    hosts = {start.host for number in range(4) for start in open_run(f"{launch.folder}/task{number}").starts}
    assert hosts == {"node1", "node2"}
    listed = launch.torchx("list", "-s", "slurm")
    for number in range(4):
        handle = f"slurm://torchx/{job_id}_{number}"
        assert "State: SUCCEEDED" in launch.torchx("status", handle) and re.search(rf"{handle}\s+SUCCEEDED", listed)
        assert f"task{number}" in launch.torchx("log", handle)
    job_id = launch.torchx(*run, "trainer.max_steps=100000").split()[-1].rpartition("/")[2]
    launch.wait_for(f"{job_id}_1", r"step (\d+)/")
    launch.torchx("cancel", f"slurm://torchx/{job_id}_1")
    launch.cluster.wait_for_state(f"{job_id}_1", "CANCELLED")
    assert launch.cluster.state(f"{job_id}_2") == "RUNNING"
    launch.torchx("cancel", f"slurm://torchx/{job_id}")
    for number in (0, 2, 3):
        launch.cluster.wait_for_state(f"{job_id}_{number}", "CANCELLED")
