"""A sweep searches values of a training, remembers what it has seen, and trains the poor ones no longer than it must."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchx.specs import AppState, AppStatus, runopts

from pipeline.cli.command_line import load_config
from pipeline.cli.sweep import compose, training_words
from pipeline.config.jobs.train import SweepJob
from pipeline.config.sweep import KnobConfig, SweepConfig
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.runtime.storage.lease import held_by
from pipeline.training.runs.folder import open_run
from pipeline.training.sweep.jobs import SchedulerJobs
from pipeline.training.sweep.outcome import describe, importance, render_page, winner_command
from pipeline.training.sweep.pool import Pool, Training
from pipeline.training.sweep.run import SweepResult, sweep
from pipeline.training.sweep.rungs import next_task, num_rungs, steps_at
from pipeline.training.sweep.space import as_overrides, edges, grid
from pipeline.training.sweep.study import Study, Trial
from tests.support import forks
from tests.support.messages import names

pytest.importorskip("optuna", reason="a sweep needs Optuna: pip install 'torchrec-pipeline[sweep]'")
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


@pytest.mark.parametrize(("knob", "says"), [
    ({"low": 1.0}, "low and high"), ({"low": 1.0, "high": 1.0}, "high"), ({"low": 0.0, "high": 1.0, "log": True}, "log=true"),
    ({"choices": [1], "low": 0.0, "high": 1.0}, "either"), ({"choices": [1], "when": {"b": [1]}}, "no knob before"),
])  # fmt: skip
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


def _play(
    config: SweepConfig, curve: Callable[[dict, float], float], parallel: int, total: int = 81
) -> tuple[list[Trial], int]:
    """Trials of a grid whose metric is `curve` of point and share of steps; and the steps trained."""
    points, trials, steps = grid(config.params), [], 0
    busy: dict[int, int] = {}
    while True:
        while len(busy) < parallel and (task := next_task(trials, busy, len(points), config)):
            trial, rung = task
            if trial is None:
                trial = Trial(len(trials), points[len(trials)], "running")
                trials.append(trial)
            busy[trial.number] = rung
        if not busy:
            return trials, steps
        number, rung = next(iter(busy.items()))
        del busy[number]
        trial = trials[number]
        before = steps_at(trial.rung, total, config) if trial.rung >= 0 else 0
        steps += steps_at(rung, total, config) - before
        trial.values[rung] = curve(trial.point, steps_at(rung, total, config) / total)
        trial.state = "complete" if rung == num_rungs(config) - 1 else "running"


@pytest.mark.parametrize("parallel", [1, 4])
def test_asha_finds_the_grids_best_with_less_than_40_percent_of_its_steps(parallel: int) -> None:
    params = {name: KnobConfig(choices=[1, 2, 3, 4, 5]) for name in ("a", "b")}
    draw = np.random.default_rng(0)
    noise: dict[str, float] = {}

    def curve(point: dict, share: float) -> float:
        luck = noise.setdefault(f"{point}{share}", draw.normal(0, 0.002))
        return 0.7 + 0.02 * abs(point["a"] - 2) + 0.01 * abs(point["b"] - 4) + 0.3 * math.exp(-4 * share) + luck

    config = SweepConfig(params=params, sampler="grid", prune="asha")
    trials, steps = _play(config, curve, parallel)
    assert len(trials) == 25 and steps <= 0.4 * 25 * 81
    best = min((trial for trial in trials if trial.state == "complete"), key=lambda trial: trial.value)
    assert best.point == {"a": 2, "b": 4}
    whole, all_steps = _play(SweepConfig(params=params, sampler="grid"), curve, parallel)
    assert all_steps == 25 * 81 and all(trial.state == "complete" for trial in whole)


def test_of_few_trials_one_is_trained_to_the_end() -> None:
    config = SweepConfig(params={"a": KnobConfig(choices=[1, 2])}, sampler="grid", prune="asha")
    trials, _ = _play(config, lambda point, share: point["a"] + 1 - share, 1)
    assert [trial.rung for trial in trials] == [2, 0]


def test_a_study_that_is_opened_anew_goes_on_as_one_that_was_not(tmp_path: Path) -> None:
    config = SweepConfig(params={"lr": LR, "dim": KnobConfig(choices=[8, 16])}, trials=14)

    def played(folder: str, anew: bool) -> list[dict]:
        study = Study(folder, config, ["w"], 1.0)
        for _ in range(14):
            study = Study(folder, config, ["w"], 1.0) if anew else study
            trial = study.ask()
            trial.values[0] = abs(math.log10(trial.point["lr"]) + 1.0) + trial.point["dim"] / 100
            study.report(trial.number, 0, trial.values[0])
            study.end(trial, "complete")
        return [trial.point for trial in study.trials()]

    points = played(f"{tmp_path}/a", False)
    assert points == played(f"{tmp_path}/b", True)
    early, late = points[:5], points[9:]
    assert np.mean([abs(math.log10(p["lr"]) + 1) for p in late]) < np.mean(
        [abs(math.log10(p["lr"]) + 1) for p in early]
    )
    with pytest.raises(ConfigError, match=names("sweep.seed other run_dir")):
        Study(f"{tmp_path}/a", SweepConfig(params=config.params, trials=14, seed=1), ["w"], 1.0)
    Study(f"{tmp_path}/a", SweepConfig(params=config.params, trials=30, parallel=4), ["w"], 1.0)


def test_importance_tells_a_knob_that_matters_from_one_that_does_not() -> None:
    draw = np.random.default_rng(0)
    trials = [
        Trial(
            number,
            {"lr": float(draw.uniform(0, 1)), "luck": float(draw.uniform(0, 1)), "kind": str(number % 2)},
            "complete",
        )
        for number in range(60)
    ]
    for trial in trials:
        trial.values[0] = trial.point["lr"] + 0.05 * draw.normal()
    found = importance(trials)
    assert next(iter(found)) == "lr" and found["lr"] > 0.7 and found["luck"] < 0.15 and found["kind"] < 0.15
    assert importance(trials[:3]) == {}


@pytest.mark.usefixtures("warm")
def test_a_sweep_trains_ordinary_runs_and_goes_on_where_it_was(prepared_clicks: str, tmp_path: Path) -> None:
    words = [
        f"data.path={prepared_clicks}", f"run_dir={tmp_path}/s", LAUNCH, "trainer.max_steps=6", "sweep.rungs=2",
        "sweep.sampler=random", "sweep.prune=asha", "sweep.params={optimizer.sparse.lr: {low: 0.001, high: 0.5, log: true}}",
    ]  # fmt: skip
    first = _sweep(*words, "sweep.trials=2")
    assert [trial.state for trial in first.trials].count("complete") == 1
    result = _sweep(*words, "sweep.trials=3", "sweep.seeds=2")
    assert len(result.trials) == 3 and [trial.point for trial in result.trials][:2] == [
        trial.point for trial in first.trials
    ]
    best = result.ranked[0]
    run = open_run(f"{tmp_path}/s/trials/{best.number:04d}")
    assert (run.step, run.state) == (6, "finished")
    assert run.config["optimizer"]["sparse"]["lr"] == best.point["optimizer.sparse.lr"]
    assert run.metrics("validation")[1]["ne"] == best.value
    assert len(run.starts) == 2 and [start.from_step for start in run.starts] == [0, 2]
    text = describe(result)
    assert "steps trained" in text and f"optimizer.sparse.lr={best.point['optimizer.sparse.lr']}" in winner_command(
        result
    )
    assert all(len(folders) == 2 for folders in result.finalists)
    page = render_page(result, "a & b")
    assert "a &amp; b" in page and page.count("<svg") == 2 and not re.search(r"(src|href)=|https?:", page)


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
            f"data.path={prepared_clicks}", f"run_dir={tmp_path}/s", f"sweep.launch=['{sys.executable}','{script}']",
            "sweep.trials=1", "sweep.params={optimizer.sparse.lr: {choices: [0.1]}}", "sweep.retries=2",
        )  # fmt: skip
    assert (tmp_path / "tried").read_text() == "xxx"
    assert "out of luck" in (tmp_path / "s/trials/0000.log").read_text()


def _words(prepared_clicks: str, folder: Path) -> list[str]:
    return [
        *WORDS, f"data.path={prepared_clicks}", f"run_dir={folder}", LAUNCH, "trainer.max_steps=40", "sweep=lr", "sweep.trials=20",
        "checkpoint.save_every_steps=5",
    ]  # fmt: skip


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
        return int(re.search(r"process (\d+)", held_by(str(run), 60.0))[1])  # type: ignore[index]

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


def _replayed(config: SweepConfig, values: dict[str, dict[int, float]], total: int) -> tuple[Trial, int]:
    """What ASHA chooses where each point's metric at each step is known, and the steps that it trains."""

    def measured(point: dict, share: float) -> float:
        return values[json.dumps(point)][round(share * total)]

    trials, steps = _play(config, measured, 1, total)
    complete = [trial for trial in trials if trial.state == "complete"]
    return min(complete, key=lambda trial: (trial.value, trial.number)), steps


@pytest.mark.campaign
@pytest.mark.usefixtures("warm")
def test_asha_on_real_trainings_finds_the_grids_best_within_noise(prepared_clicks: str, tmp_path: Path) -> None:
    """Grids of 25 pairs of rates with three seeds. ASHA's choice and the grid's are held to the seeds that did not choose them."""
    params = {
        "optimizer.sparse.lr": KnobConfig(choices=[0.003, 0.01, 0.03, 0.1, 0.3]),
        "optimizer.dense.lr": KnobConfig(choices=[0.0003, 0.001, 0.003, 0.01, 0.03]),
    }
    chosen = ", ".join(f"{key}: {{choices: {knob.choices}}}" for key, knob in params.items())
    words = [
        f"data.path={prepared_clicks}", LAUNCH, "trainer.max_steps=81", "sweep.sampler=grid", "sweep.trials=25", "sweep.parallel=2",
        "trainer.evaluate_max_batches=null", "trainer.evaluate_every_steps=9", f"sweep.params={{{chosen}}}",
    ]  # fmt: skip
    config, seeds = SweepConfig(params=params, sampler="grid", prune="asha"), range(3)
    values: dict[int, dict[str, dict[int, float]]] = {}
    for seed in seeds:
        folder = tmp_path / f"grid{seed}"
        grid_result = _sweep(*words, f"run_dir={folder}", f"trainer.seed={seed}")
        values[seed] = {
            json.dumps(trial.point): {
                step: metrics["ne"]
                for (_, step), metrics in open_run(f"{folder}/trials/{trial.number:04d}").evaluations.items()
            }
            for trial in grid_result.trials
        }
    asha = _sweep(*words, f"run_dir={tmp_path}/asha", "trainer.seed=0", "sweep.prune=asha", "sweep.parallel=1")
    points = list(values[0])
    final = np.array([[values[seed][point][81] for point in points] for seed in seeds])  # [seed, point]
    regrets, shares = [], []
    for row, seed in enumerate(seeds):
        by_asha, steps = _replayed(config, values[seed], 81)
        if seed == 0:
            assert asha.ranked[0].point == by_asha.point and asha.steps_trained == steps  # as the real one did
        best, found = int(final[row].argmin()), points.index(json.dumps(by_asha.point))
        others = np.delete(final, row, axis=0)
        regrets.append(float((others[:, found] - others[:, best]).mean()))
        shares.append(steps / (25 * 81))
        print(
            f"seed {seed}: grid {points[best]} NE {final[row, best]:.4f}, with other seeds {others[:, best].mean():.4f}; ASHA {points[found]} "
            f"NE {final[row, found]:.4f}, with other seeds {others[:, found].mean():.4f}; {100 * shares[-1]:.0f} % of the steps"
        )
    noise = float(np.sqrt(final[:, np.argsort(final.mean(axis=0))[:5]].var(axis=0, ddof=1).mean()))
    truly = points[int(final.mean(axis=0).argmin())]
    print(
        f"best over all seeds: {truly} NE {final.mean(axis=0).min():.4f}; between seeds, of the five best points, ± {noise:.4f}"
    )
    print(
        f"ASHA less the grid, with other seeds: {np.mean(regrets):+.4f}, of each {[round(each, 4) for each in regrets]}"
    )
    assert max(shares) <= 0.4
    assert np.mean(regrets) <= noise


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


def test_jobs_of_a_scheduler_are_submitted_once_followed_and_taken_up(tmp_path: Path) -> None:
    runner = FakeRunner()

    def opened() -> Pool:
        return Pool(2, SchedulerJobs("slurm", {"time": 30}, ["-j", "1x2"], "Q_1", runner))  # type: ignore[arg-type]

    def training(number: int) -> Training:
        folder = f"{tmp_path}/trials/{number:04d}"
        return Training(folder, ["a=1", f"run_dir={folder}"], f"{folder}.log")

    pool = opened()
    pool.start(training(0))
    pool.start(training(1))
    component, words, settings = runner.submitted[0]
    assert component == "pipeline.train" and words[:6] == ["--name", "q-1-0000", "-j", "1x2", "--", "a=1"]
    assert settings == {"time": "30", "output": f"{tmp_path}/trials/0000.log"} and not pool.has_room
    runner.states["slurm://session/1"] = AppState.FAILED
    ended = pool.wait()
    assert ended.run_dir.endswith("0001") and ended.ended == "slurm://session/1 FAILED" and not ended.is_mistake
    pool.start(ended)
    assert len(runner.submitted) == 3 and ended.attempts == 2
    pool.close()  # they run on
    pool = opened()
    assert pool.take_up(training(0)) and len(runner.submitted) == 3
    pool.start(training(1))
    assert len(runner.submitted) == 3
    runner.states["slurm://session/0"] = AppState.UNKNOWN  # a scheduler that does not answer costs no job
    runner.states["slurm://session/2"] = AppState.SUCCEEDED
    assert pool.wait().run_dir.endswith("0001")
    runner.states.pop("slurm://session/0")
    assert "not known" in pool.wait().ended
    with pytest.raises(ConfigError, match=names("sweep.scheduler_args.tme time")):
        SchedulerJobs("slurm", {"tme": 30}, [], "q", runner)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=names("sweep.scheduler=slrm slurm")):
        SchedulerJobs("slrm", {}, [], "q", runner)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=names("sweep.job_args")):
        SweepConfig(job_args=["-j", "1x2"])
