"""What is printed for a scheduler holds against its rules, and a line for cron runs as cron would run it."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch.extras.crontab import CrontabOptions, ScrontabOptions, render_crontab, render_scrontab
from launch.schedule import CronJobOptions, main, render_cronjob, schedule
from launch.workload import Where, Workload, make_workload
from tests.launch.manifests import assert_valid, expand, pod_templates, read
from tests.support.messages import mentions

HOURLY = "0 * * * *"
PREPARE = ["--verb", "prepare", "--"]


@pytest.fixture(scope="module")
def tick() -> Workload:
    """Ends at once with a user's error: there is no such source."""
    where = Where(env={"SHARE": "5%"}, name="tick")
    return make_workload("prepare", None, ["data=quickstart", "source='nowhere, 100 %'"], where)


@pytest.fixture(scope="module")
def contained() -> Workload:
    words = ["experiment=mlperf_dlrmv2", "data.path=/data"]
    return make_workload(
        "train", None, words, Where(j="2x4", image="ours:1", cpu=8, gpu=4, memMB=16000), check_data=False
    )


def _cronjob(workload: Workload, **options: Any) -> list[dict[str, Any]]:
    return read(render_cronjob(workload, HOURLY, CronJobOptions(**options)))


def test_a_cronjob_holds_against_the_schemas(contained: Workload) -> None:
    plain = _cronjob(contained)
    full = _cronjob(contained, time_zone="Europe/Berlin", queue="team-a", concurrency="Replace", deadline_s=0, start_within_s=60)  # fmt: skip
    for manifest in [*plain, *full]:
        assert_valid(manifest)
    (_, cronjob), (_, other) = plain, full
    spec = cronjob["spec"]
    assert (spec["schedule"], spec["concurrencyPolicy"], spec["startingDeadlineSeconds"]) == (HOURLY, "Forbid", 600)
    assert spec["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 86400
    assert other["spec"]["timeZone"] == "Europe/Berlin" and other["spec"]["concurrencyPolicy"] == "Replace"
    job = other["spec"]["jobTemplate"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a" and job["spec"]["suspend"]
    assert "activeDeadlineSeconds" not in job["spec"]


def test_the_pods_of_a_tick_meet_by_the_name_of_its_own_job(contained: Workload) -> None:
    service, cronjob = _cronjob(contained)
    (template,) = pod_templates(cronjob)
    (container,) = template["spec"]["containers"]
    command = container["command"]
    endpoint = expand(command[command.index("--rdzv-endpoint") + 1], {"JOB_NAME": "mlperf-dlrmv2-29370240"})
    assert endpoint == f"mlperf-dlrmv2-29370240-0.{service['metadata']['name']}:29500"
    (job_name,) = (each for each in container["env"] if each["name"] == "JOB_NAME")
    assert job_name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.labels['job-name']"}}
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("target", "argv", "message"),
    [
        ("cron", PREPARE, "--cron"),
        ("cron", ["--cron", "0 * * *", *PREPARE], "4 5"),
        ("cron", ["--cron", HOURLY, "--verb", "prepar", "--"], "prepare"),
        ("cron", ["--cron", HOURLY, *PREPARE, "data=quickstar", "source=x"], "quickstart"),
        (
            "cron",
            ["--cron", HOURLY, "--image", "a", *PREPARE, "data=quickstart", "source=x"],
            "cron container",
        ),
        ("cron", ["--cron", HOURLY, *PREPARE, "data=quickstart", r"source='a\\b'"], "backslash"),
        ("cron", ["--cron", HOURLY, *PREPARE, "data=quickstart", f"source={'x' * 1000}"], "998"),
        ("slurm", ["--cron", HOURLY, "--comment", "two words", *PREPARE, "data=quickstart", "source=x"], "blanks"),
        ("slurm", ["--cron", HOURLY, "--time", "soon", *PREPARE, "data=quickstart", "source=x"], "time soon"),
        ("kubernetes", ["--cron", HOURLY, *PREPARE, "data=quickstart", "source=x"], "--image"),
        ("kubernetes", ["--cron", HOURLY, "--time-zone", "Europe/Berln", *PREPARE], "Europe/Berlin'"),
        ("kubernetes", ["--cron", HOURLY, "--concurrency", "Allow", *PREPARE], "--concurrency='Allow'"),
        ("kubernetes", ["--cron", HOURLY, "--start-within-s", "5", *PREPARE], "[10, 5940]"),
        ("kubernetes", ["--cron", HOURLY, "--kind", "jobset", *PREPARE], "CronJob"),
    ],
)
def test_what_no_scheduler_could_run_is_said_here(
    target: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        schedule(target, argv)
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert mentions(captured.err, message) and captured.err.count("\n") == 1


def test_a_scheduler_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["launch.schedule", "kubernets", "--cron", HOURLY])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("cron, kubernetes, slurm; did you mean 'kubernetes'?\n")


def _as_cron_reads(line: str) -> tuple[str, str]:
    """The five fields, and the command that cron hands to sh: up to the first bare %, and without the \\ before others."""
    fields, command = re.fullmatch(r"((?:\S+ ){5})(.*)", line).groups()
    assert re.search(r"(?<!\\)%", command) is None
    return fields.strip(), command.replace(r"\%", "%")


@pytest.mark.long
def test_a_line_for_cron_runs_in_its_folder_with_a_log_and_a_lock(tick: Workload, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    comment, line = render_crontab(tick, HOURLY, CrontabOptions(folder=str(folder))).splitlines()
    fields, command = _as_cron_reads(line)
    assert comment.startswith("# prepare") and fields == HOURLY

    def run() -> subprocess.CompletedProcess[str]:
        environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}  # as cron has it
        repository = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        return subprocess.run(
            ["/bin/sh", "-c", command], cwd="/", env=environ | repository, capture_output=True, text=True
        )

    done = run()
    log = folder / "logs" / "tick.log"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    assert "nowhere, 100 %" in log.read_text()
    said = log.read_text()
    with open(folder / "logs" / "tick.log.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run()
    assert (done.returncode, log.read_text()) == (0, said)  # another one was running


def test_a_line_for_scrontab_carries_sbatchs_options_and_starts_the_ranks_by_srun() -> None:
    words = ["experiment=mlperf_dlrmv2", "data.path=/data", "name='$HOME'"]
    workload = make_workload("train", None, words, Where(j="2x8", gpu=8, env={"NCCL_DEBUG": "WARN"}), check_data=False)
    options = ScrontabOptions(partition="gpu", account="ads", time="4:00:00", folder="/srv/recsys")
    head, *scron, line = render_scrontab(workload, HOURLY, options).splitlines()
    assert head.startswith("# train") and all(each.startswith("#SCRON --") for each in scron)
    found = {each.removeprefix("#SCRON ") for each in scron}
    assert {"--partition=gpu", "--account=ads", "--time=4:00:00", "--nodes=2", "--gpus-per-node=8", "--signal=TERM@60"} <= found  # fmt: skip
    assert "--chdir=/srv/recsys" in found and not {"--requeue", "--no-requeue"} & found
    assert line.startswith(f"{HOURLY} export PYTHONUNBUFFERED=1; ")
    *_, srun = line.split("; exec ")
    assert srun.startswith("srun ") and '--rdzv-endpoint "$head_node:$port"' in srun
    assert "export NCCL_DEBUG=WARN" in line and line.endswith("""'name='"'"'$HOME'"'"''""")
    syntax = subprocess.run(["/bin/sh", "-n", "-c", line.removeprefix(HOURLY)], capture_output=True, text=True)
    assert syntax.returncode == 0, syntax.stderr


def test_crontab_itself_takes_the_line(tick: Workload, tmp_path: Path) -> None:
    crontab = shutil.which("crontab")
    if crontab is None or "dry" not in subprocess.run([crontab, "-h"], capture_output=True, text=True).stderr:
        pytest.skip("no crontab with a dry run (Debian's cron) is installed")
    (tmp_path / "tab").write_text(render_crontab(tick, "*/15 0-6 1,15 * 1-5", CrontabOptions()))
    done = subprocess.run([crontab, "-n", str(tmp_path / "tab")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
