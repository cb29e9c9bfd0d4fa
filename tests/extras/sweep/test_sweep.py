"""A sweep searches values of a training, remembers what it has seen, and trains the poor ones no longer than it must."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torchx.specs import AppState, AppStatus, runopts

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.extras.runs.folder import open_run
from pipeline.extras.sweep.cli.sweep import compose, training_words
from pipeline.extras.sweep.config import KnobConfig, SweepConfig, SweepJob
from pipeline.extras.sweep.launchers import Ended, SchedulerJobs, Training
from pipeline.extras.sweep.outcome import describe, importance, on_edges, render_page, winner_command
from pipeline.extras.sweep.run import SweepResult, sweep, value_of
from pipeline.extras.sweep.study import Point, Search, as_overrides, edges, grid, open_study, steps_at
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.runtime.storage.lease import held_by
from tests.support import forks
from tests.support.messages import names

optuna = pytest.importorskip("optuna", reason="a sweep needs Optuna: pip install 'torchrec-pipeline[sweep]'")
LR = KnobConfig(low=0.01, high=1.0, log=True)
WORDS = [
    "experiment=quickstart",
    "hardware=cpu",
    "trainer.global_batch_size=256",
    "logger=jsonl",
    "trainer.evaluate_max_batches=4",
]
LAUNCH = f"sweep.launch=['{sys.executable}','-m',tests.support.trial]"


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forks.ADDRESS, forks.server_address())


def _sweep(*words: str) -> SweepResult:
    return sweep(load_config(SweepJob, [*WORDS, *words]), training_words([*WORDS, *words]), compose)


def test_a_grid_holds_each_point_once_and_conditional_knobs_where_they_apply() -> None:
    params = {
        "model": KnobConfig(choices=["dlrm", "dlrm_dcn"]),
        "model.dcn_num_layers": KnobConfig(low=1, high=3, integer=True, when={"model": ["dlrm_dcn"]}),
        "optimizer.dense.lr": KnobConfig(low=0.1, high=0.3, step=0.1),
    }
    points = grid(params)
    assert len(points) == 3 + 3 * 3
    assert {"model": "dlrm", "optimizer.dense.lr": 0.3} in points
    assert all(("model.dcn_num_layers" in point) == (point["model"] == "dlrm_dcn") for point in points)
    assert {"model": "dlrm_dcn", "model.dcn_num_layers": 3} in list(edges(params))


def test_values_read_back_as_they_are() -> None:
    point = {"a": "a b", "b": True, "c": None, "d": [8, 4], "e": 1e-05, "f": "dlrm", "g": 3}
    assert as_overrides(point) == ["a='a b'", "b=true", "c=null", "d=[8,4]", "e=1e-05", "f=dlrm", "g=3"]


@pytest.mark.parametrize(
    ("knob", "says"),
    [
        ({"low": 1.0}, "low and high"),
        ({"low": 1.0, "high": 1.0}, "high"),
        ({"low": 0.0, "high": 1.0, "log": True}, "log=true"),
        ({"choices": [1], "low": 0.0, "high": 1.0}, "either"),
        ({"choices": [1], "when": {"b": [1]}}, "not a knob before"),
    ],
)
def test_a_knob_that_makes_no_sense_is_refused(knob: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SweepConfig(params={"a": KnobConfig(**knob)})


def test_a_knob_that_no_training_has_is_refused_before_anything_is_trained(
    prepared_clicks: str, tmp_path: Path
) -> None:
    words = [
        f"data.path={prepared_clicks}",
        f"run_dir={tmp_path}/s",
        "sweep.params={optimizer.dense.rate: {choices: [1]}}",
    ]
    with pytest.raises(ConfigError, match=names("optimizer.dense.rate")):
        _sweep(*words)
    with pytest.raises(ConfigError, match="no knob: choose sweep="):
        _sweep(f"data.path={prepared_clicks}", f"run_dir={tmp_path}/s")
    assert not (tmp_path / "s").exists()


def test_jobs_are_checked_in_a_folder_of_their_own_and_not_in_that_of_the_last_training(tmp_path: Path) -> None:
    seen: list[str] = []

    def note(words: list[str]) -> TrainJob:
        seen.extend(words)
        raise ConfigError("stop here")

    words = ["sweep.params={optimizer.dense.lr: {choices: [1]}}", f"run_dir={tmp_path}/s"]
    with pytest.raises(ConfigError, match="stop here"):
        sweep(load_config(SweepJob, [*WORDS, *words]), WORDS, note)
    assert f"run_dir={tmp_path}/s/trials/unused" in seen


def test_a_best_value_at_the_end_of_its_range_is_reported(tmp_path: Path) -> None:
    knob = KnobConfig(low=0.1, high=0.5, step=0.1)
    config = SweepConfig(params={"a": knob, "b": knob}, sampler="grid")
    study = _played(str(tmp_path), config, lambda point, _: point["a"] + abs(point["b"] - 0.3))
    (remark,) = on_edges(SweepResult(str(tmp_path), "ne", study, ["w"]))
    assert remark.startswith("a=0.1 ") and remark.endswith("widen sweep.params.a.low")


def _played(folder: str, config: SweepConfig, metric: Callable[[Point, int], float]) -> optuna.Study:
    """A study whose metric is a function of point and rung; `config.parallel` trials at a time."""
    study = open_study(folder, config, ["w"], maximize=False)

    async def measure(number: int, point: Point, rung: int) -> float:
        await asyncio.sleep(0)
        return metric(point, rung)

    async def play() -> None:
        search = Search(study, config, measure)
        await asyncio.gather(*(search.run() for _ in range(config.parallel)))

    asyncio.run(play())
    return study


@pytest.mark.parametrize("parallel", [1, 4])
def test_asha_finds_the_grids_best_with_less_than_half_of_its_steps(tmp_path: Path, parallel: int) -> None:
    params = {name: KnobConfig(choices=[1, 2, 3, 4, 5]) for name in ("a", "b")}
    draw, noise = np.random.default_rng(0), dict[str, float]()

    def metric(point: Point, rung: int) -> float:
        luck = noise.setdefault(f"{point}{rung}", draw.normal(0, 0.002))
        return 0.7 + 0.02 * abs(point["a"] - 2) + 0.01 * abs(point["b"] - 4) + 0.1 * (2 - rung) + luck

    config = SweepConfig(params=params, sampler="grid", trials=25, prune="asha", parallel=parallel)
    study = _played(f"{tmp_path}/s", config, metric)
    steps = sum(steps_at(len(trial.intermediate_values) - 1, 81, config) for trial in study.trials)
    assert len(study.trials) == 25 and steps <= 0.5 * 25 * 81
    assert study.best_params == {"a": 2, "b": 4}
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "PRUNED"}


def test_a_study_that_is_opened_again_continues_as_one_that_was_not(tmp_path: Path) -> None:
    config = SweepConfig(params={"lr": LR, "dim": KnobConfig(choices=[8, 16])}, trials=14)
    killed = False

    def metric(point: Point, rung: int) -> float:
        return abs(math.log10(point["lr"]) + 1.0) + point["dim"] / 100

    def killed_once(point: Point, rung: int) -> float:
        nonlocal killed
        if not killed and len(open_study(f"{tmp_path}/b", config, ["w"], maximize=False).trials) == 9:
            killed = True
            raise KeyboardInterrupt
        return metric(point, rung)

    points = [trial.params for trial in _played(f"{tmp_path}/a", config, metric).trials]
    with pytest.raises(KeyboardInterrupt):
        _played(f"{tmp_path}/b", config, killed_once)
    assert [trial.params for trial in _played(f"{tmp_path}/b", config, killed_once).trials] == points
    distances = [abs(math.log10(point["lr"]) + 1) for point in points]
    assert np.mean(distances[9:]) < np.mean(distances[:5])
    with pytest.raises(ConfigError, match=names("sweep.seed run_dir")):
        open_study(f"{tmp_path}/a", replace(config, seed=1), ["w"], maximize=False)
    open_study(f"{tmp_path}/a", replace(config, trials=30, parallel=4), ["w"], maximize=False)


def test_importance_tells_a_knob_that_matters_from_one_that_does_not(tmp_path: Path) -> None:
    params = {"lr": KnobConfig(low=0.0, high=1.0), "luck": KnobConfig(low=0.0, high=1.0)}
    config = SweepConfig(params=params, sampler="random", trials=60)
    found = importance(_played(f"{tmp_path}/s", config, lambda point, rung: point["lr"]))
    assert next(iter(found)) == "lr" and found["lr"] > 0.7 and found["luck"] < 0.3
    assert importance(_played(f"{tmp_path}/few", replace(config, trials=3), lambda point, rung: point["lr"])) == {}


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_a_sweep_trains_ordinary_runs_and_goes_on_where_it_was(prepared_clicks: str, tmp_path: Path) -> None:
    words = [
        f"data.path={prepared_clicks}",
        f"run_dir={tmp_path}/s",
        LAUNCH,
        "trainer.max_steps=6",
        "sweep.rungs=2",
        "sweep.sampler=random",
        "sweep.prune=asha",
        "sweep.params={optimizer.sparse.lr: {low: 0.001, high: 0.5, log: true}}",
    ]
    first = _sweep(*words, "sweep.trials=2").trials
    assert len(first) == 2 and first[0].state.name == "COMPLETE"
    result = _sweep(*words, "sweep.trials=3", "sweep.seeds=2")
    assert [trial.params for trial in result.trials][:2] == [trial.params for trial in first]
    best = result.ranked[0]
    run = open_run(f"{tmp_path}/s/trials/{best.number:04d}")
    assert (run.step, run.state) == (6, "finished")
    assert run.config["optimizer"]["sparse"]["lr"] == best.params["optimizer.sparse.lr"]
    assert run.metrics("validation")[1]["ne"] == value_of(best)
    assert len(run.starts) == 2 and [start.from_step for start in run.starts] == [0, 2]
    text = describe(result)
    assert "steps trained" in text and f"optimizer.sparse.lr={best.params['optimizer.sparse.lr']}" in winner_command(
        result
    )
    assert all(len(folders) == 2 for folders in result.finalists)
    page = render_page(result, "a & b")
    assert "a &amp; b" in page and page.count("<svg") == 3 and not re.search(r"(src|href)=|https?:", page)


@pytest.mark.usefixtures("warm")
def test_a_training_that_fails_is_tried_again_and_then_left_out(prepared_clicks: str, tmp_path: Path) -> None:
    script = tmp_path / "flaky.py"
    script.write_text(
        "import pathlib, sys\n"
        f"tried = pathlib.Path({str(tmp_path)!r}) / 'tried'\n"
        "tried.write_text(tried.read_text() + 'x' if tried.exists() else 'x')\n"
        "sys.exit('out of luck')\n"
    )
    with pytest.raises(TrainingError, match="every training"):
        _sweep(
            f"data.path={prepared_clicks}",
            f"run_dir={tmp_path}/s",
            f"sweep.launch=['{sys.executable}','{script}']",
            "sweep.trials=1",
            "sweep.params={optimizer.sparse.lr: {choices: [0.1]}}",
            "sweep.retries=2",
        )
    assert (tmp_path / "tried").read_text() == "xxx"
    assert "out of luck" in (tmp_path / "s/trials/0000.log").read_text()


def _words(prepared_clicks: str, folder: Path) -> list[str]:
    return [
        *WORDS,
        f"data.path={prepared_clicks}",
        f"run_dir={folder}",
        LAUNCH,
        "trainer.max_steps=40",
        "sweep=lr",
        "sweep.trials=20",
        "checkpoint.save_every_steps=5",
    ]


def _points(folder: Path) -> list[tuple[str, float]]:
    found = []
    for run in sorted((folder / "trials").glob("????")):
        opened = open_run(str(run))
        found.append((json.dumps(opened.config["optimizer"]), opened.metrics("validation")[1]["ne"]))
    return found


@pytest.mark.campaign
@pytest.mark.usefixtures("warm")
def test_twenty_trials_killed_twice_end_with_the_same_study(prepared_clicks: str, tmp_path: Path) -> None:
    whole = forks.WarmCommand("pipeline sweep", _words(prepared_clicks, tmp_path / "whole"))
    out, err = whole.communicate(600)
    assert whole.returncode == 0, err
    words = _words(prepared_clicks, tmp_path / "killed")

    def until_trial(number: int) -> int:
        """The process of the trial, once it has saved a step."""
        run = tmp_path / f"killed/trials/{number:04d}"
        while not (run / "checkpoints/step_00000005").exists() or not held_by(str(run), 60.0):
            time.sleep(0.05)
        return int(re.search(r"process (\d+)", held_by(str(run), 60.0))[1])

    killed = forks.WarmCommand("pipeline sweep", words)
    until_trial(3)
    killed.kill()
    killed.wait(60)
    again = forks.WarmCommand("pipeline sweep", words)
    os.kill(until_trial(7), signal.SIGKILL)
    out, err = again.communicate(600)
    assert again.returncode == 0, err
    assert "is started again" in err
    assert _points(tmp_path / "whole") == _points(tmp_path / "killed")
    assert len(_points(tmp_path / "killed")) == 20
    print(out)


class FakeRunner:
    """What a sweep asks of TorchX's runner: jobs that train nothing, and end when they are told to."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, list[str], dict]] = []
        self.states: dict[str, AppState] = {}

    def scheduler_backends(self) -> list[str]:
        return ["slurm", "kubernetes"]

    def scheduler_run_opts(self, scheduler: str) -> runopts:
        options = runopts()
        options.add("time", type_=str, help="", default=None)
        options.add("output", type_=str, help="", default=None)
        return options

    def run_component(self, component: str, words: list[str], scheduler: str, settings: dict) -> str:
        handle = f"{scheduler}://session/{len(self.submitted)}"
        self.submitted.append((component, words, settings))
        self.states[handle] = AppState.PENDING
        return handle

    def status(self, handle: str) -> AppStatus | None:
        if handle not in self.states:
            return None
        if self.states[handle] == AppState.UNKNOWN:
            raise OSError("no answer")
        return AppStatus(self.states[handle])

    def close(self) -> None: ...


def test_jobs_of_a_scheduler_are_submitted_once_and_followed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SchedulerJobs, "poll_s", 0.01)
    runner = FakeRunner()

    def run(number: int, state: AppState | None = None) -> Ended:
        """To its end; `state`: of its job, once it is asked for."""
        jobs = SchedulerJobs("slurm", {"time": 30}, ["-j", "1x2"], "Q_1", runner)
        folder = f"{tmp_path}/trials/{number:04d}"

        async def followed() -> Ended:
            task = asyncio.create_task(jobs.run(Training(folder, ["a=1", f"run_dir={folder}"])))
            await asyncio.sleep(0.05)
            if state is None:
                task.cancel()  # the sweep ends, and the job runs on
            else:
                runner.states[(tmp_path / f"trials/{number:04d}.job").read_text().strip()] = state
            return await task

        return asyncio.run(followed())

    with pytest.raises(asyncio.CancelledError):
        run(0)
    component, words, settings = runner.submitted[0]
    assert component == "pipeline.train" and words[:6] == ["--name", "q-1-0000", "-j", "1x2", "--", "a=1"]
    assert settings == {"time": "30", "output": f"{tmp_path}/trials/0000.log"}
    assert run(1, AppState.FAILED) == Ended("slurm://session/1 FAILED")
    assert run(1, AppState.SUCCEEDED) == Ended("slurm://session/2 SUCCEEDED")  # submitted again
    assert run(0, AppState.SUCCEEDED) == Ended("slurm://session/0 SUCCEEDED") and len(runner.submitted) == 3
    with pytest.raises(ConfigError, match=names("sweep.scheduler_args.tme time")):
        SchedulerJobs("slurm", {"tme": 30}, [], "q", runner)
    with pytest.raises(ConfigError, match=names("sweep.scheduler=slrm slurm")):
        SchedulerJobs("slrm", {}, [], "q", runner)
    with pytest.raises(ConfigError, match=names("sweep.job_args")):
        SweepConfig(job_args=["-j", "1x2"])
