"""A sweep whose trainings are jobs of a real Slurm of two nodes: killed, its jobs run on and are taken up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.extras.runs.folder import open_run
from pipeline.extras.sweep.cli.sweep import compose, training_words
from pipeline.extras.sweep.config import SweepJob
from pipeline.extras.sweep.run import sweep
from tests.launch.launching import START_S, Launch
from tests.launch.slurm_cluster import wait_until
from tests.support import forks

pytest.importorskip("optuna", reason="a sweep needs Optuna: pip install 'torchrec-pipeline[sweep]'")
NUM_TRIALS = 20


class Driver:
    """`python -m pipeline sweep` at the cluster's login node, which ends with this object's kill()."""

    def __init__(self, launch: Launch, words: list[str], log: Path) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "pipeline", "sweep", *words]
        environment = {**os.environ, **launch.cluster.env, **launch.env}
        self._log = open(log, "wb")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            launch.cluster.hosts["ctl"].command("bash", "-c", 'cd "$0" && exec "$@"', str(launch.folder), *command),
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


def _found(folder: Path) -> list[tuple[str, float]]:
    runs = [open_run(str(run)) for run in sorted((folder / "trials").glob("????"))]
    return [(json.dumps(run.config["optimizer"]), run.metrics("validation")[1]["ne"]) for run in runs]


@pytest.mark.campaign
def test_a_sweep_of_twenty_jobs_killed_twice_ends_with_the_study_of_one_that_was_not(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = [
        *(word for word in launch.overrides if not word.startswith(("run_dir", "trainer.epochs"))),
        "trainer.max_steps=40",
        "checkpoint.save_every_steps=5",
        "logger=jsonl",
        "sweep=lr",
        f"sweep.trials={NUM_TRIALS}",
        "sweep.sampler=random",
        "sweep.parallel=2",
    ]
    folder, log = tmp_path / "sweep", tmp_path / "driver.log"
    words = [
        *shared,
        f"run_dir={folder}",
        "sweep.scheduler=slurm",
        "sweep.scheduler_args={time: 30}",
        "sweep.job_args=[-j,1x1,--cpu,'4']",
    ]

    def has_saved(number: int) -> bool:
        return (folder / f"trials/{number:04d}/checkpoints/step_00000005").exists()

    first = Driver(launch, words, log)
    wait_until(lambda: has_saved(2) or first.process.poll() is not None, "third trial", 2 * START_S)
    first.kill()
    jobs = {path.name: path.read_text() for path in folder.glob("trials/*.job")}
    second = Driver(launch, words, tmp_path / "again.log")
    wait_until(lambda: has_saved(7) or second.process.poll() is not None, "eighth trial", 4 * START_S)
    launch.cluster.ask(
        "scancel", "--signal=KILL", "--full", (folder / "trials/0007.job").read_text().rpartition("/")[2].strip()
    )
    assert second.process.wait(3 * 600) == 0, (tmp_path / "again.log").read_text()
    said = (tmp_path / "again.log").read_text()
    print(said)
    assert "is started again" in said
    # The jobs of the sweep that was killed ran on, and none was submitted twice.
    assert len(jobs) >= 3 and jobs == {name: (folder / "trials" / name).read_text() for name in jobs}
    hosts = {start.host for run in (folder / "trials").glob("????") for start in open_run(str(run)).starts}
    assert hosts == {"node1", "node2"}
    monkeypatch.setenv(forks.ADDRESS, forks.server_address())
    local = [*shared, f"run_dir={tmp_path}/local", f"sweep.launch=['{sys.executable}','-m',tests.support.trial]"]
    sweep(load_config(SweepJob, local), training_words(local), compose)
    assert _found(folder) == _found(tmp_path / "local") and len(_found(folder)) == NUM_TRIALS
