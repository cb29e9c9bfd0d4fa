"""What launch.render prints for Slurm and torchrun runs as it is, and holds no secret."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.render import render
from launch.slurm import SlurmOptions, limit_seconds
from launch.workload import parse_mounts
from pipeline.data.dataset import FILE_NAME
from pipeline.runtime.storage import storage
from tests.support.datasets import described_dataset
from tests.support.messages import mentions
from tests.support.object_store import BUCKET, FaultyProxy, store

__all__ = ["store"]
CLUSTER = [
    "--partition", "gpu", "--account", "ads", "--qos", "high", "--constraint", "h100&ib", "--time", "1-12:00:00",
    "--comment", 'week 7, "second" try', "--mail-user", "a@b.c", "--mail-type", "FAIL,REQUEUE", "--signal", "TERM@300",
    "--sbatch=--reservation=r1 --exclusive", "--output", "logs/%x-%j.out", "--env-file", "cluster.sh",
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "dataset.json").write_text(described_dataset({"cat_0": 10}, num_dense=13, num_rows=4096).to_json())
    return f"data.path={tmp_path}"


def _slurm(data: str, *flags: str, verb: str = "train", words: tuple[str, ...] = ()) -> str:
    return render("slurm", [verb, *flags, "--", "experiment=quickstart", data, *words])


def _checked_by_bash(script: str) -> str:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return script


def test_a_script_names_the_shape_and_every_option_of_the_cluster(data: str) -> None:
    script = _checked_by_bash(_slurm(data, "-j", "2x8", "--cpu", "96", "--gpu", "8", "--memMB", "900000", *CLUSTER))
    assert re.findall("(?m)^#SBATCH (.*)", script) == [
        "--job-name=quickstart", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=96", "--gpus-per-node=8",
        "--mem=900000M", "--partition=gpu", "--account=ads", "--qos=high", "--time=1-12:00:00", "--constraint=h100&ib",
        '--comment="week 7, \\"second\\" try"', "--mail-user=a@b.c", "--mail-type=FAIL,REQUEUE", "--signal=TERM@300",
        "--requeue", "--output=logs/%x-%j.out", "--open-mode=append", "--reservation=r1", "--exclusive",
    ]  # fmt: skip
    assert "export OMP_NUM_THREADS=12\n" in script  # 96 cores, 8 ranks
    assert "--cpus-per-task=$SLURM_CPUS_PER_TASK" in script  # srun does not take it over since 22.05


def test_words_and_variables_arrive_as_they_were_typed(data: str, tmp_path: Path) -> None:
    odd = "tables={cat_0: {pooling: mean}}"
    script = _slurm(data, "--env", "A=1,2", "--env", "B=$HOME 'x' \"y\"", words=(odd, "run_dir='a b/${name}'"))
    # The script with srun replaced by what shows its words and environment.
    shown = tmp_path / "shown.json"
    show = (
        f'{sys.executable} -c \'import json,os,sys; json.dump([sys.argv[1:], dict(os.environ)], open("{shown}", "w"))\''
    )
    runnable = re.sub(r"(?m)^srun ", f"{show} ", script)
    env = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "4"}
    subprocess.run(["bash"], input=runnable, text=True, env={**os.environ, **env}, capture_output=True, timeout=120)
    words, environment = json.loads(shown.read_text())
    assert words[-4:] == ["experiment=quickstart", data, odd, "run_dir='a b/${name}'"]
    assert (environment["A"], environment["B"]) == ("1,2", "$HOME 'x' \"y\"")
    assert words[words.index("--rdzv-id") + 1] == "77.0" and environment["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time", "soon"], "time=soon"),
        (["--time", "1"], "time=1 60"),
        (["--time", "0:59"], "59 60"),
        (["--time", "0-0:05", "--signal", "TERM@300"], "300"),
        (["-j", "1x8", "--gpu", "4"], "1x8 4 2x4"),
        (["--signal", "USR1@60"], "TERM"),
        (["--comment", "a\nb"], "line"),
        (["--comment", "s3://key:secret@host/x"], "comment credential"),
        (["--env", "AWS_SECRET_ACCESS_KEY=abcd"], "AWS_SECRET_ACCESS_KEY"),
        (["--env", "URL=https://me:pw@host/"], "URL"),
        (["--env", "A"], "NAME=VALUE"),
        (["--env", "A B=1"], "environment variable"),
        (["--mount", "src=/a"], "type"),
        (["-h", "h100"], None),
        (["--h", "h100_80gb"], "h100_80gb_x8"),
    ],
)
def test_what_a_script_cannot_hold_is_refused(
    data: str, flags: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        _slurm(data, *flags)
    said = capsys.readouterr()
    assert "secret" not in said.err and "abcd" not in said.err
    if message is None:  # -h is help, as everywhere
        assert stop.value.code == 0 and said.out.startswith("usage:")
    else:
        assert stop.value.code == 2 and mentions(said.err, message) and said.err.count("\n") == 1


def test_a_secret_of_the_environment_is_never_printed(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-print-me")
    script = _slurm(data, "-j", "2x1", "--gpu", "0", *CLUSTER)
    assert "do-not-print-me" not in script and "set -x" not in script and "set -ev" not in script


def test_only_what_goes_on_is_requeued_after_sigterm(data: str) -> None:
    assert "75)\n" in _slurm(data) and "--signal=TERM@60" in _slurm(data)
    assert "75) [" in _slurm(data, words=("checkpoint.folder=s3://bucket/steps",))  # nobody lists those from a script
    plan = _slurm(data, verb="plan")
    assert "75)" not in plan and "--signal" not in plan
    assert "scontrol requeue" not in _slurm(data, "--no-requeue") and "#SBATCH --no-requeue" in _slurm(
        data, "--no-requeue"
    )


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:30", 7230),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("UNLIMITED", None),
        (None, None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(time: str | None, seconds: int | None) -> None:
    assert limit_seconds(time) == seconds


SRUN = """#!/bin/bash
starts=$(cat starts); echo $((starts + 1)) > starts
[ "${SAVES:-}" = yes ] && mkdir -p "steps/step_0000000$starts"
exit "$CODE"
"""


@pytest.mark.parametrize(
    ("code", "saves", "max_retries", "starts"),
    [
        (75, "no", 0, 4),  # three more for pre-emptions before the first step
        (75, "yes", 0, 8),  # for as long as it is stopped
        (75, "no", 5, 6),
        (1, "no", 2, 3),
        (2, "no", 2, 1),
        (0, "yes", 2, 1),
    ],
)
def test_a_job_that_saves_nothing_is_not_requeued_for_ever(
    data: str, tmp_path: Path, code: int, saves: str, max_retries: int, starts: int
) -> None:
    """The rendered script with Slurm's commands replaced: started again as often as it asks to be, at most 8 times."""
    script = _slurm(data, "--max-retries", str(max_retries), words=("checkpoint.folder=steps", f"run_dir={tmp_path}"))
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "starts").write_text("0\n")
    commands = {"srun": SRUN, "squeue": "#!/bin/bash\necho RUNNING\n", "scontrol": "#!/bin/bash\n[ $1 = requeue ] && touch again\n"}  # fmt: skip
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "CODE": str(code),
           "SAVES": saves, "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "1"}  # fmt: skip
    for number in range(8):
        again = tmp_path / "again"
        again.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "job.sh"], cwd=tmp_path, env={**env, "SLURM_RESTART_COUNT": str(number)}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        if not again.exists():
            break
    assert int((tmp_path / "starts").read_text()) == starts
    assert code or not (tmp_path / "job-7.failures").exists()


def test_containers_are_those_of_pyxis(data: str) -> None:
    script = _slurm(
        data, "--image", "ours:1", "--mount", "type=bind,src=/data,dst=/data,readonly,type=bind,src=/runs,dst=/r"
    )
    assert "--container-image=ours:1 --container-mounts=/data:/data:ro,/runs:/r python -m pipeline agent" in script.replace(" \\\n    ", " ")  # fmt: skip
    assert [mount.read_only for mount in parse_mounts("type=bind,src=/a,dst=/b,readonly,type=volume,src=v,dst=/v")] == [True, False]  # fmt: skip


def test_sbatch_options_are_those_of_torchx_too() -> None:
    from launch.slurm_scheduler import create_scheduler

    known = dict(create_scheduler("test").run_opts())
    fields = {name.replace("_", "-") for name in SlurmOptions.__dataclass_fields__}
    assert fields <= set(known) and "job_dir" in known


@pytest.mark.campaign
def test_torchrun_lines_train(prepared_clicks: str, tmp_path: Path) -> None:
    overrides = [
        "experiment=quickstart", "hardware=cpu", "planner=torchrec", f"data.path={prepared_clicks}", f"run_dir={tmp_path}/a run",
        "trainer.global_batch_size=256", "trainer.evaluate_batch_size=512", "trainer.evaluate_max_batches=1", "trainer.max_steps=3",
    ]  # fmt: skip
    lines = render("torchrun", ["train", "-j", "1x1", "--env", "NOTE=it's", "--", *overrides])
    assert ["export", "NOTE=it's"] in [shlex.split(line) for line in lines.splitlines()]
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "a run" / "logs").glob("rank_0.stdout.log")
    assert "trained to step 3" in log.read_text() and log.is_symlink()


def test_torchrun_on_several_nodes_wants_the_first_ones_name(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "-j", "2x4", "--", "experiment=quickstart", data]
    with pytest.raises(SystemExit):
        render("torchrun", words)
    assert mentions(capsys.readouterr().err, "NAME")
    assert '"n1:29500"' in render("torchrun", ["train", "--head", "n1", *words[1:]])


def test_a_data_set_in_a_store_is_read_from_there(
    store: FaultyProxy, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"s3://{BUCKET}/clicks"
    storage.publish_text(f"{folder}/{FILE_NAME}", Path(data.removeprefix("data.path="), FILE_NAME).read_text())
    words = ["experiment=quickstart", f"data.path={folder}"]
    assert "srun" in render("slurm", ["train", "-j", "1x4", "--gpu", "4", "--", *words])
    with pytest.raises(SystemExit):
        render("slurm", ["train", "-j", "1x4", "--gpu", "4", "--", *words, "tables.cat_99.embedding_dim=8"])
    assert mentions(capsys.readouterr().err, "cat_99")
    with pytest.raises(SystemExit):
        render("slurm", ["train", "-j", "1x4", "--gpu", "4", "--", *words[:1], f"{words[1]}_none"])
    assert mentions(capsys.readouterr().err, f"{folder}_none")


def test_a_data_set_that_only_the_cluster_sees_needs_a_flag_and_what_needs_no_data_is_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["experiment=quickstart", "data.path=/cluster/alone"]
    with pytest.raises(SystemExit):
        render("slurm", ["train", "-j", "2x8", "--gpu", "8", "--", *words])
    assert mentions(capsys.readouterr().err, "/cluster/alone --no-check-data --check_data")
    assert "srun" in render("slurm", ["train", "-j", "2x8", "--gpu", "8", "--no-check-data", "--", *words])
    assert mentions(capsys.readouterr().err, "data.path=/cluster/alone not checked")
    with pytest.raises(SystemExit):
        render("slurm", ["train", "-j", "4x8", "--no-check-data", "--", *words])
    assert mentions(capsys.readouterr().err, "data.reader.num_streams=16 32")


def test_a_rehearsal_tries_the_jobs_own_ranks_first_and_stops_what_would_fail(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "rehearsed $*"\nexit $(cat {tmp_path}/code)\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    words = [
        "train",
        "-j",
        "2x8",
        "--h",
        "h100_80gb_x8",
        "--rehearse",
        "--no-check-data",
        "--",
        "experiment=mlperf_dlrmv2",
    ]
    (tmp_path / "code").write_text("0")
    assert "--gpus-per-node=8" in render("slurm", words)
    said = capfd.readouterr()
    assert mentions(
        said.err, "pipeline rehearse hardware=h100_80gb experiment=mlperf_dlrmv2 world_size=16 ranks=[0,15]"
    )
    (tmp_path / "code").write_text("2")
    with pytest.raises(SystemExit) as stop:
        render("slurm", words)
    assert stop.value.code == 2 and capfd.readouterr().out == ""
    with pytest.raises(SystemExit):
        render("slurm", ["plan", "--rehearse", "--no-check-data", "--", "experiment=quickstart"])
    assert mentions(capfd.readouterr().err, "--rehearse plan")
