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

from pipeline.cli.command_line import load_config
from pipeline.cli.sweep import compose, training_words
from pipeline.config.jobs import SweepJob
from pipeline.config.sweep import KnobConfig, SweepConfig
from pipeline.runtime.errors import ConfigError, TrainingError
from pipeline.runtime.storage.lease import held_by
from pipeline.training.runs.folder import open_run
from pipeline.training.sweep.outcome import describe, importance, render_page, winner_command
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
    result = _sweep(*words, "sweep.trials=4", "sweep.seeds=2")
    assert len(result.trials) == 4 and [trial.point for trial in result.trials][:2] == [
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
    whole = forks.WarmCommand("pipeline.sweep", _words(prepared_clicks, tmp_path / "whole"))
    out, err = whole.communicate(600)
    assert whole.returncode == 0, err
    words = _words(prepared_clicks, tmp_path / "killed")

    def until_trial(number: int) -> int:
        """The process of the trial, once it has saved a step."""
        run = tmp_path / f"killed/trials/{number:04d}"
        while not (run / "checkpoints/step_00000005").exists() or not held_by(str(run), 60.0):
            time.sleep(0.05)
        return int(re.search(r"process (\d+)", held_by(str(run), 60.0))[1])  # type: ignore[index]

    killed = forks.WarmCommand("pipeline.sweep", words)
    until_trial(3)
    killed.kill()
    killed.wait(60)
    again = forks.WarmCommand("pipeline.sweep", words)
    os.kill(until_trial(7), signal.SIGKILL)
    out, err = again.communicate(600)
    assert again.returncode == 0, err
    assert "is started again" in err
    assert _points(tmp_path / "whole") == _points(tmp_path / "killed")
    assert len(_points(tmp_path / "killed")) == 20
    print(out)


@pytest.mark.campaign
@pytest.mark.usefixtures("warm")
def test_asha_on_real_trainings_finds_the_grids_best_within_noise(prepared_clicks: str, tmp_path: Path) -> None:
    rates = "[0.003,0.01,0.03,0.1,0.3]"
    words = [
        f"data.path={prepared_clicks}", LAUNCH, "trainer.max_steps=81", "sweep.sampler=grid", "sweep.trials=25",
        "trainer.evaluate_max_batches=null",
        f"sweep.params={{optimizer.sparse.lr: {{choices: {rates}}}, optimizer.dense.lr: {{choices: [0.0003,0.001,0.003,0.01,0.03]}}}}",
    ]  # fmt: skip
    whole = _sweep(*words, f"run_dir={tmp_path}/grid", "sweep.seeds=3", "sweep.finalists=1")
    asha = _sweep(*words, f"run_dir={tmp_path}/asha", "sweep.prune=asha")
    nes = [open_run(folder).metrics("validation")[1]["ne"] for folder in whole.finalists[0]]
    noise = float(np.std(nes, ddof=1))
    print(f"grid: {whole.ranked[0].point} NE {whole.ranked[0].value:.4f}, seeds ± {noise:.4f}")
    print(
        f"asha: {asha.ranked[0].point} NE {asha.ranked[0].value:.4f}, {asha.steps_trained} of {whole.steps_trained} steps"
    )
    assert asha.steps_trained <= 0.4 * whole.steps_trained
    assert asha.ranked[0].value <= whole.ranked[0].value + 2 * noise
