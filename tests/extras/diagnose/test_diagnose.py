"""Planted faults get their diagnosis with numbers and a command, and a healthy run gets none. All 28 faults: benchmarks/diagnoses.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from benchmarks.diagnoses import FAULTS, Fault, prepared
from pipeline.config.training import LossConfig
from pipeline.extras.diagnose.hook import Diverging
from pipeline.extras.diagnose.rules import RULES, find_problems, try_diagnose
from pipeline.extras.runs.folder import open_run
from tests.support.messages import mentions

FINE = {"ne": 0.85, "auc": 0.76, "calibration": 1.01, "label_rate": 0.3, "num_samples": 2400}
IN_DATA = ("leak", "second_label", "repeated_over_splits", "label_shift", "unseen_ids", "collisions", "unscaled")


def run_of(folder: Path, data: str, train_ne: list[float], epochs: int = 1, **changed: float) -> Path:
    """A run folder as a training leaves it, with these numbers."""
    run, steps = folder / "run", 150 * epochs
    run.mkdir()
    config = {
        "data": {"path": data, "columns": {"label": "click"}},
        "trainer": {"global_batch_size": 128, "log_every_steps": 25},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": steps * (number + 1) // len(train_ne), "time": 0.0, "ne": ne, "lr_dense": 0.01}
        for number, ne in enumerate(train_ne)
    ]
    lines.append({"kind": "validation", "step": steps, "time": 0.0, **FINE, **changed})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def found(run: Path) -> list[str]:
    return [each.key for each in find_problems(open_run(str(run)))]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("healthy")
    prepared(Fault("", "nothing"), folder)
    return str(folder / "ds")


def first(key: str) -> Fault:
    return next(fault for fault in FAULTS if fault.key == key)


@pytest.mark.long
@pytest.mark.parametrize("fault", [first(key) for key in IN_DATA], ids=lambda fault: fault.key)
def test_a_fault_in_the_data_is_found_first(tmp_path: Path, fault: Fault) -> None:
    prepared(fault, tmp_path)
    run = run_of(tmp_path, str(tmp_path / "ds"), [0.95, 0.86])
    assert found(run)[:1] == [fault.key]
    assert all("Next: python -m pipeline" in text for text in try_diagnose(str(run)))


@pytest.mark.parametrize(
    ("train_ne", "epochs", "changed", "expected"),
    [
        ([0.95, 0.86], 1, {}, []),
        ([19.7, 16.0], 1, {"ne": 16.3, "auc": 0.54}, ["diverged"]),
        ([0.8, 0.95], 1, {"ne": 1.0, "auc": 0.7}, ["diverged"]),
        ([0.9, 0.55], 5, {"ne": 1.02}, ["overfitting"]),
        ([0.9, 0.6], 1, {"ne": 0.95}, ["other_rows"]),
        ([0.999, 0.998], 1, {"ne": 0.998, "auc": 0.55}, ["underfitting"]),
        ([0.95, 0.86], 1, {"calibration": 1.4}, ["calibration"]),
        ([0.95, 0.86], 1, {"auc": 0.996, "ne": 0.1}, ["leak"]),
    ],
)
def test_numbers_of_a_run_are_diagnosed(
    tmp_path: Path, healthy: str, train_ne: list[float], epochs: int, changed: dict[str, float], expected: list[str]
) -> None:
    assert found(run_of(tmp_path, healthy, train_ne, epochs, **changed)) == expected


@pytest.mark.parametrize(("pos_weight", "told"), [(4.0, True), (1.0, False)])
def test_a_changed_loss_is_named_next_to_its_calibration(
    tmp_path: Path, healthy: str, pos_weight: float, told: bool
) -> None:
    run = run_of(tmp_path, healthy, [0.95, 0.86], calibration=1.4)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["trainer"]["loss"] = asdict(LossConfig(pos_weight=pos_weight))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (problem,) = find_problems(open_run(str(run)))
    assert problem.key == "calibration" and ("trainer.loss" in problem.text) is told


def test_importance_shows_dead_features_and_leaks(tmp_path: Path, healthy: str) -> None:
    run = run_of(tmp_path, healthy, [0.95, 0.86])
    values = {"price": (0.0, 0.0), "user": (0.05, 0.001), "item": (0.04, 0.001)}
    for name, expected in (("price", "dead_feature"), ("user", "leak")):
        measured = values if name == "price" else values | {"price": (0.01, 0.001), "user": (2.0, 0.05)}
        features = {each: {"ne_increase": rise, "error": error} for each, (rise, error) in measured.items()}
        (run / "importance.json").write_text(
            json.dumps({"rows": 2000, "split": "validation", "step": 150, "features": features})
        )
        problem = find_problems(open_run(str(run)))[0]
        assert problem.key == expected and mentions(problem.text, name)


def test_a_run_whose_data_are_gone_is_diagnosed_by_its_numbers(tmp_path: Path) -> None:
    run = run_of(tmp_path, str(tmp_path / "nothing"), [19.7, 16.0], ne=16.0)
    assert found(run) == ["diverged"]
    assert try_diagnose(str(tmp_path)) == []  # no run: a training does not fail by it


def test_each_rule_explains_known_findings() -> None:
    keys = {rule.key for rule in RULES}
    assert all(set(rule.explains) <= keys for rule in RULES)
    assert {fault.key for fault in FAULTS} <= keys


def test_a_high_rate_is_reported_at_the_first_log_line_once(caplog: pytest.LogCaptureFixture) -> None:
    rates = SimpleNamespace(sparse=SimpleNamespace(lr=5.0), dense=SimpleNamespace(lr=0.5))
    job, parts = SimpleNamespace(optimizer=rates), SimpleNamespace(context=SimpleNamespace(is_main=True))
    hook = Diverging(cast(Any, job), cast(Any, parts))
    for step, ne in ((25, 1.3), (50, float("nan")), (75, 19.7), (100, 18.0)):
        hook.on_step_end(cast(Any, SimpleNamespace(step=step, logged={"click/ne": ne})))
    (line,) = caplog.messages
    assert mentions(line, "step 75 19.7 optimizer.sparse.lr=0.5 optimizer.dense.lr=0.05")
