"""A run publishes while it trains: when it is due, one step at a time, the newest of those that wait, and the last."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import PublishingConfig, TrainJob
from pipeline.config.serving import ParityConfig
from pipeline.extras.publish import worker
from pipeline.extras.publish.hook import Answer, ProgressiveValidation, PublishDeltas, normalized_entropy
from pipeline.models.tasks.click import Prediction
from pipeline.serving.artifact.deltas import deltas_folder, newest_sequence, read_delta
from pipeline.serving.artifact.manifest import read_manifest
from pipeline.serving.scoring.predictor import Predictor
from pipeline.training.train import train
from tests.extras.publish.test_deltas import export_step
from tests.serving.test_artifacts_served import raw_rows


class Publications:
    """Stands in for the publishing process."""

    def __init__(self, job: TrainJob) -> None:
        self.sent: list[int] = []
        self.answers: list[Answer] = []
        self.ended = False

    def send(self, step: int) -> None:
        self.sent.append(step)

    def answer(self, timeout_s: float = 0.0) -> Answer | None:
        if not self.answers and timeout_s and self.sent:
            return {"step": self.sent[-1], "sequence": len(self.sent), "rows": 1, "bytes": 1}
        return self.answers.pop(0) if self.answers else None

    def end(self) -> None:
        self.ended = True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _hook(when: str) -> tuple[PublishDeltas, Any, Clock, Publications]:
    job = TrainJob(name="test", run_dir="unused", publishing=PublishingConfig(when=when))
    clock, made = Clock(), []

    def start(of: TrainJob) -> Publications:
        made.append(Publications(of))
        return made[-1]

    parts: Any = SimpleNamespace(context=SimpleNamespace(is_main=True))
    hook = PublishDeltas(job, parts, clock, start)
    state = SimpleNamespace(
        step=0, saved_step=0, preempted=False, grow_tables=False, sync=SimpleNamespace(save_wanted=False)
    )
    hook.on_train_start(state)
    return hook, state, clock, made[0]


def _step(hook: PublishDeltas, state: Any) -> None:
    """As the trainer and the hook that saves do it."""
    state.sync.save_wanted = False
    hook.on_step_start(state)
    state.step += 1
    if state.sync.save_wanted:
        state.saved_step = state.step
    hook.on_step_end(state)


def test_steps_are_published_by_number_and_one_waits_at_most() -> None:
    hook, state, _, published = _hook("every_2_steps")
    for _ in range(9):
        _step(hook, state)
    assert published.sent == [2], "4, 6 and 8 wait for it, and 8 is the newest"
    published.answers.append({"step": 2, "sequence": 1, "rows": 5, "bytes": 60})
    _step(hook, state)
    assert published.sent == [2, 8]
    assert hook.log_values(state)["published_sequence"] == 1
    published.answers.append({"step": 8, "failed": "it is gone"})
    _step(hook, state)
    assert published.sent == [2, 8, 10] and hook.log_values(state)["publish_failures"] == 1
    state.saved_step = state.step
    hook.on_fit_end(state)
    hook.close()
    assert published.sent[-1] == 11 and published.ended


def test_a_run_that_is_asked_to_stop_publishes_the_step_that_it_has_saved() -> None:
    hook, state, _, published = _hook("every_5_minutes")
    _step(hook, state)
    state.preempted, state.saved_step = True, state.step
    hook.on_fit_end(state)
    assert published.sent == [1] and hook.log_values(state)["published_step"] == 1


def test_a_pause_of_the_input_publishes_the_step_that_was_saved_after_one_in_work() -> None:
    hook, state, _, published = _hook("every_4_steps")
    for _ in range(6):
        _step(hook, state)
    state.saved_step = state.step
    hook.on_input_pause(state)
    assert published.sent == [4, 6] and hook.log_values(state)["published_step"] == 4
    _step(hook, state)
    assert published.sent == [4, 6], "the input goes on, and the next is due at step 8"


def test_steps_are_published_by_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    hook, state, clock, published = _hook("every_5_minutes")
    for clock.now in (0.0, 299.0, 300.0, 301.0, 599.0, 600.0):
        published.answers += [{"step": step, "sequence": 1, "rows": 1, "bytes": 1} for step in published.sent[-1:]]
        _step(hook, state)
    assert published.sent == [3, 6]
    published.answers.append({"step": 6, "stopped": "NE 0.9 is +0.1"})
    for clock.now in (901.0, 1300.0):
        _step(hook, state)
    assert published.sent == [3, 6] and hook.log_values(state)["publish_stopped"] == 1.0
    assert [record.levelname for record in caplog.records if "NE 0.9" in record.message] == ["ERROR"]


def test_progressive_ne_is_that_of_the_rows_since_the_last_save() -> None:
    job = TrainJob(name="test", run_dir="unused", publishing=PublishingConfig(when="every_minute"))
    parts: Any = SimpleNamespace(context=SimpleNamespace(device=torch.device("cpu"), world_size=1), task=None)
    hook, state = ProgressiveValidation(job, parts), SimpleNamespace()
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(64, generator=generator), (torch.rand(64, generator=generator) < 0.3).float()
    weights = (torch.arange(64) % 8 > 0).float()
    for part in (slice(0, 40), slice(40, 64)):
        hook.on_batch_end(state, Prediction(torch.tensor(0.0), logits[part], labels[part], weights[part]))
    hook.on_batch_end(state, None)  # a batch that updated nothing
    found = hook.saved_values(state)["progressive"]
    kept, p = weights.bool().numpy(), torch.sigmoid(logits).double().numpy()
    y = labels.double().numpy()[kept]
    loss, rate = -np.mean(np.where(y == 1, np.log(p[kept]), np.log(1 - p[kept]))), y.mean()
    assert found["ne"] == pytest.approx(loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)), rel=1e-6)
    assert found["weight"] == 56
    assert hook.saved_values(state) == {"progressive": {}}
    assert normalized_entropy(3.0, 5.0, 5.0) is None and not math.isnan(normalized_entropy(3.0, 2.0, 5.0) or math.nan)


def _words(prepared: str, run: Path, *more: str) -> list[str]:
    return [
        "experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", f"data.path={prepared}", f"run_dir={run}",
        "trainer.max_steps=24", "checkpoint.differential=true", "checkpoint.keep_last_n=9", "trainer.evaluate_max_batches=1",
        "publishing.when=every_6_steps", "publishing.precision=fp32", "publishing.gate.max_rows=500", *more,
    ]  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("asynchronous", [False, True], ids=["waits", "asynchronous"])
def test_a_training_publishes_what_an_export_of_its_last_step_scores(
    prepared_clicks: str, tmp_path: Path, asynchronous: bool
) -> None:
    """Also with averaged layers, and with scores that are calibrated again at each delta."""
    run = tmp_path / "run"
    words = ["trainer.average.kind=ema", "publishing.calibration.kind=platt", f"checkpoint.asynchronous={asynchronous}"]
    train(load_config(TrainJob, _words(prepared_clicks, run, *words)))
    artifact = str(run / "artifacts/published")
    predictor = Predictor.load(artifact)
    predictor.catch_up(artifact)
    assert predictor.sequence == newest_sequence(deltas_folder(artifact)) >= 1
    assert predictor.applied is not None and predictor.applied.step == 24
    rows = raw_rows(Path(prepared_clicks).parent / "clicks.tsv", 300)
    calibrated = ["calibration.kind=platt", "parity.max_rows=100000"]
    whole = Predictor.load(export_step(run, 24, tmp_path / "whole", "precision=fp32", *calibrated))
    assert predictor.calibration is not None
    np.testing.assert_array_equal(predictor.score(rows).scores, whole.score(rows).scores)
    delta = read_delta(deltas_folder(artifact), artifact, read_manifest(artifact), 1)
    assert 0.3 < delta.stats["progressive_ne"] < 3.0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("published_sequence", -1) >= 0 for line in lines)


@pytest.mark.campaign
def test_a_chain_that_is_long_ends_with_a_whole_artifact_of_its_last_step(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "published"
    orders = [
        {
            "run": str(small_run),
            "artifact": str(made),
            "gate": {"max_rows": 300, "max_ne_increase": 9.0},
            "max_chain": 1e-6,
        },
        *({"step": step} for step in (10, 20, 30, 30, 7)),
    ]
    lenient = {"max_rows": 300, "max_ne_increase": 1.0, "max_auc_decrease": 1.0, "max_score_difference": 1.0}
    monkeypatch.setattr(worker, "ExportJob", lambda **given: ExportJob(**given, parity=ParityConfig(**lenient)))
    answers: list[dict[str, Any]] = []
    worker.serve(map(json.dumps, orders), answers.append)
    assert [(each["step"], each.get("sequence")) for each in answers[:4]] == [(10, 0), (20, 1), (30, 1), (30, None)]
    assert "failed" in answers[4], "a step that is gone costs nothing but itself"
    assert [Path(each["artifact"]).name for each in answers[:3]] == [
        "published.000001",
        "published.000002",
        "published.000003",
    ]
    assert made.is_symlink() and made.resolve().name == "published.000003"
    assert not (tmp_path / "published.000001").exists(), "two are kept"
    begun = Predictor.load(str(tmp_path / "published.000002"))
    begun.catch_up(str(tmp_path / "published.000002"))
    ids = torch.arange(100)
    assert torch.equal(begun.lookup.stored(25, ids), Predictor.load(str(made)).lookup.stored(25, ids))


@pytest.mark.campaign
def test_a_delta_that_does_not_pass_stops_the_chain_and_not_the_training(
    prepared_clicks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        summary = train(
            load_config(TrainJob, _words(prepared_clicks, run, "publishing.gate.max_rows_fraction=0.0000001"))
        )
    assert summary.step == 24
    artifact = run / "artifacts/published"
    pin = json.loads((artifact / "deltas/pin.json").read_text())
    assert pin["sequence"] == 0 and "max_rows_fraction" in pin["reason"]
    assert any(record.levelname == "ERROR" and "unpin=true" in record.message for record in caplog.records)
    predictor = Predictor.load(str(artifact))
    predictor.catch_up(str(artifact))
    assert predictor.sequence == 0
