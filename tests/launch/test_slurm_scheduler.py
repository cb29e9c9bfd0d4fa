"""What our Slurm scheduler does beside Slurm: options with `=`, copies of sources, arrays, jobs that Slurm has forgotten."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch import slurm_jobs, torchx_commands
from launch.render import render
from launch.slurm_scheduler import copy_sources, create_scheduler, sealed, unsealed
from pipeline.runtime.errors import LaunchError
from tests.support.messages import mentions, names

KNOWN = ["partition", "time", "sbatch", "mail-user"]


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ("sbatch=--dependency=afterok:2", {"sbatch": "--dependency=afterok:2"}),
        ("time=30,sbatch=--reservation=r1 --nice=5,partition=gpu", {"time": "30", "sbatch": "--reservation=r1 --nice=5", "partition": "gpu"}),
        ("sbatch=--gres=a:1,b=2;mail-user=a@b.c", {"sbatch": "--gres=a:1,b=2", "mail-user": "a@b.c"}),
        ("time=1:00:00", {"time": "1:00:00"}),
    ],
)  # fmt: skip
def test_sbatch_takes_options_of_any_form(typed: str, options: dict[str, str]) -> None:
    """`cannot be split into val<delim>key`, TorchX said, of the help's own example."""
    cfg = create_scheduler("test").run_opts().cfg_from_str(sealed(typed, KNOWN))
    assert {name: unsealed(str(value)) for name, value in cfg.items()} == options


def _write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_a_copy_of_the_sources_holds_no_environment_no_data_and_no_run(tmp_path: Path) -> None:
    """A link of .venv ended TorchX's copy with IsADirectoryError; where it worked, it took 98 MB of data along."""
    source = tmp_path / "checkout"
    _write(
        source, "pipeline/a.py", "conf/b.yaml", ".venv/lib/c.py", "runs/x/plan.json", "datasets/d.parquet", "gone.py"
    )
    (source / ".venv" / "lib64").symlink_to("lib")
    (source / "link").symlink_to("pipeline")
    git = ["git", "-C", str(source)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "pipeline", "conf", "link", "gone.py"], check=True)
    (source / "gone.py").unlink()
    copy_sources(str(source), str(tmp_path / "job"))
    copied = {str(path.relative_to(tmp_path / "job")) for path in (tmp_path / "job").rglob("*") if not path.is_dir()}
    assert copied - {"link"} == {"pipeline/a.py", "conf/b.yaml"}
    assert (tmp_path / "job" / "link").is_symlink()
    with pytest.raises(LaunchError, match=names("job_dir")):
        copy_sources(str(source), str(tmp_path / "job"))

    subprocess.run(["rm", "-rf", str(source / ".git")], check=True)
    (source / ".torchxignore").write_text("runs\ndatasets\n")
    copy_sources(str(source), str(tmp_path / "other"))
    assert {path.name for path in (tmp_path / "other").iterdir()} == {"pipeline", "conf", "link", ".torchxignore"}


ARRAY = """JobId=50 ArrayJobId=49 ArrayTaskId=2 JobName=predict JobState=COMPLETED Reason=None ExitCode=0:0 NodeList=n2 StdOut={0}/p-49_2.out
JobId=49 ArrayJobId=49 ArrayTaskId=1 JobName=predict JobState={1} Reason=None ExitCode=0:0 NodeList=n1 StdOut={0}/p-49_1.out
"""


def _array(monkeypatch: pytest.MonkeyPatch, shown: str, accounted: str) -> None:
    def run(words: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        text = {"scontrol": shown, "sacct": accounted}[words[0]]
        code = 0 if text else 1
        return subprocess.CompletedProcess(words, code, text, "" if text else "Invalid job id specified")

    monkeypatch.setattr(slurm_jobs, "_run", run)


@pytest.mark.parametrize(
    ("last", "accounted", "state", "reason"),
    [
        ("COMPLETED", "", "COMPLETED", "2 of 2 tasks, 49_2, 49_1"),
        ("RUNNING", "49_0|FAILED|predict|n1\n49_[3-4]|PENDING|predict|\n", "RUNNING", "1 of 3 tasks, 49_1"),
        ("COMPLETED", "49_0|FAILED|predict|n1\n49_1|RUNNING|predict|n1\n", "FAILED", "1 of 3 tasks, 49_0"),
        ("CANCELLED", "", "CANCELLED", "1 of 2 tasks, 49_1"),
    ],
)
def test_the_status_of_an_array_is_that_of_all_its_tasks(
    last: str, accounted: str, state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task of four had failed, and the array was SUCCEEDED; Slurm forgets tasks one by one."""
    _array(monkeypatch, ARRAY.format("", last), accounted)
    job = slurm_jobs.find_job("49")
    assert job is not None and (job.job_id, job.state, job.reason) == ("49", state, reason)
    assert {"n1", "n2"} >= set(job.nodes)
    described = create_scheduler("test").describe("49")
    assert described is not None and described.msg == f"{state}: {reason}"
    _array(monkeypatch, "", "49_0|COMPLETED|predict|n1\n49_1|FAILED|predict|n1\n")
    forgotten = slurm_jobs.find_job("49")
    assert forgotten is not None and forgotten.state == "FAILED"


def test_the_log_of_an_array_is_that_of_all_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for task in (1, 2):
        (tmp_path / f"p-49_{task}.out").write_text(f"of {task}\n")
    _array(monkeypatch, ARRAY.format(tmp_path, "RUNNING"), "")
    scheduler = create_scheduler("test")
    assert list(scheduler.log_iter("49", "predict")) == ["of 2\n", "of 1\n"]
    with pytest.raises(LaunchError, match=names("49_0")):
        scheduler.log_iter("49", "predict", should_tail=True)
    monkeypatch.setattr(slurm_jobs, "_run", _forgotten)
    torchx_commands.Log().run(argparse.Namespace(identifier="slurm://torchx/49", regex=None))
    assert capsys.readouterr().out == "of 1\nof 2\n"


def _forgotten(words: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(words, 1, "", "slurm_load_jobs error: Invalid job id specified")


def test_the_log_of_a_job_that_slurm_has_forgotten_is_read_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm_jobs, "_run", _forgotten)
    _write(tmp_path, "quickstart-8.out", "quickstart-14_1.out")
    for job_id in ("8", "14_1"):
        torchx_commands.Log().run(argparse.Namespace(identifier=f"slurm://torchx/{job_id}", regex=None))
        assert capsys.readouterr().out == f"quickstart-{job_id}.out"
    with pytest.raises(SystemExit):
        torchx_commands.Log().run(argparse.Namespace(identifier="slurm://torchx/9", regex=None))
    assert mentions(capsys.readouterr().err, "slurm://torchx/9")


def test_a_task_of_an_array_is_a_job_and_its_exit_code_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "JobId=15 ArrayJobId=14 ArrayTaskId=0 JobName=sweep JobState=FAILED Reason=None Restarts=2 ExitCode=2:0 NodeList= StdOut=/x.out"
    monkeypatch.setattr(slurm_jobs, "_run", lambda words, stdin="": subprocess.CompletedProcess(words, 0, shown, ""))
    job = slurm_jobs.find_job("14_0")
    assert job is not None and (job.state, job.restarts, job.exit_code) == ("FAILED", 2, 2)
    assert torchx_commands._exit_code("slurm://torchx/14_0") == 2 and torchx_commands._exit_code("local_cwd://x/y") == 0
    with pytest.raises(LaunchError, match=names("14_")):
        slurm_jobs.find_job("14_")


def test_the_tasks_of_an_array_have_outputs_logs_and_run_folders_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--array", "0-3%2", "--no-check-data", "--", "experiment=quickstart", "data.path=/cluster/alone"]
    script = render("slurm", [*words, 'run_dir="runs/s${oc.env:SLURM_ARRAY_TASK_ID,0}"'])
    assert "#SBATCH --array=0-3%2\n" in script and "#SBATCH --output=%x-%A_%a.out\n" in script
    assert '--log-dir runs/s0/logs"/task_$SLURM_ARRAY_TASK_ID"' in script.replace(" \\\n    ", " ")
    capsys.readouterr()
    for refused, why in ((words, "array run_dir"), ([*words[:2], "first", *words[3:]], "array=first")):
        with pytest.raises(SystemExit):
            render("slurm", refused)
        assert mentions(capsys.readouterr().err, why)
