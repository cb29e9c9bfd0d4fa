"""Jobs whose nodes come and go: what is printed for them, and who refuses them. test_slurm_elastic.py runs one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.kubernetes import render_job
from launch.kubernetes_options import KubernetesOptions
from launch.render import render
from launch.schedule import schedule
from launch.workload import Where, Workload, make_workload
from pipeline.runtime.errors import LaunchError
from tests.launch.manifests import assert_valid, pod_templates, read
from tests.support.datasets import described_dataset
from tests.support.messages import mentions, names


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "dataset.json").write_text(described_dataset({"cat_0": 10}, num_dense=13, num_rows=4096).to_json())
    return f"data.path={tmp_path}"


def _workload(data: str, mount: str) -> Workload:
    where = Where(j="2:4x2", image="ours:1", cpu=8, gpu=0, memMB=16000, mount=mount, max_retries=3)
    words = [
        "experiment=quickstart",
        data,
        "run_dir=runs/a",
        "data.reader.num_streams=24",
        "trainer.global_batch_size=2400",
    ]
    return make_workload("train", None, words, where)


def test_on_slurm_each_node_is_a_task_that_comes_back_by_itself(data: str) -> None:
    words = ["experiment=quickstart", data, "run_dir=runs/a b", "trainer.evaluate_batch_size=512"]
    script = render("slurm", ["train", "-j", "1:2x4", "--cpu", "8", "--gpu", "0", "--", *words])
    lines = re.findall("(?m)^#SBATCH (.*)", script)
    assert {"--nodes=1", "--array=0-1", "--requeue", "--output=%x-%A_%a.out"} <= set(lines)
    command = re.sub(r"\s*\\\n\s*", " ", script)
    assert "--rdzv-endpoint 'runs/a b/.meetings' --nnodes 1:2 --nproc-per-node 4 " in command
    assert (
        '--rdzv-backend folder --rdzv-id "$SLURM_ARRAY_JOB_ID" ' in command and "--log-dir 'runs/a b/logs' " in command
    )
    assert "head_node" not in script and 'scontrol requeue "$SLURM_JOB_ID"' in script


def test_on_kubernetes_pods_meet_by_their_jobs_own_number(data: str) -> None:
    service, job = read(render_job(_workload(data, "type=volume,src=claim,dst=/workspace"), KubernetesOptions()))
    assert_valid(job)
    (template,) = pod_templates(job)
    (container,) = template["spec"]["containers"]
    command, uid = container["command"], container["env"][0]
    assert command[command.index("--rdzv-id") + 1] == "$(JOB_UID)" and command[command.index("--nnodes") + 1] == "2:4"
    assert uid["name"] == "JOB_UID" and "controller-uid" in uid["valueFrom"]["fieldRef"]["fieldPath"]
    assert "--node-rank" not in command and job["spec"]["parallelism"] == 4 and service["kind"] == "Service"
    with pytest.raises(LaunchError, match=names("2:4x2 runs/a/logs mount")):
        render_job(_workload(data, ""), KubernetesOptions())
    for kind in ("jobset", "volcano", "trainjob", "pytorchjob"):
        with pytest.raises(LaunchError, match=names("2:4x2 4x2 --kind")):
            render_job(_workload(data, "type=volume,src=claim,dst=/workspace"), KubernetesOptions(kind=kind))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["slurm", "train", "-j", "2:4x2", "--", "experiment=quickstart"], "4, 6 and 8 ranks num_streams=16 divided by 6 num_streams=24"),
        (["slurm", "train", "-j", "4:2x2", "--", "experiment=quickstart"], "4:2x2 2:4x8"),
        (["slurm", "train", "-j", "1:2x2", "--", "experiment=quickstart", "planner=file", "planner.plan_file=p.json"], "planner=file 2 and 4"),
        (["slurm", "train", "-j", "1:2x2", "--array", "0-3", "--", "experiment=quickstart"], "array=0-3 1:2x2"),
        (["slurm", "train", "-j", "1:2x2", "--no-requeue", "--", "experiment=quickstart"], "requeue"),
        (["slurm", "evaluate", "-j", "1:2x2", "--no-check-data", "--", "run=runs/a"], "1:2x2 2x2"),
        (["torchrun", "train", "-j", "1:2x2", "--", "experiment=quickstart"], "torchrun 2x2"),
    ],
)  # fmt: skip
def test_nodes_that_could_not_come_and_go_are_one_line(
    argv: list[str], message: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        render(argv[0], [*argv[1:], data] if argv[1] == "train" else argv[1:])
    assert stop.value.code == 2 and mentions(capsys.readouterr().err, message)


def test_a_schedule_has_no_nodes_that_come_and_go(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        schedule("slurm", ["--cron", "@hourly", "--verb", "train", "-j", "1:2x2", "--", "experiment=quickstart", data])
    assert mentions(capsys.readouterr().err, "1:2x2 launch.schedule")
