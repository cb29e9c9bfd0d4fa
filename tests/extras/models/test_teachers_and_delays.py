"""Distillation and delayed labels find planted probabilities; bad scores of a teacher are named with their rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.config.training import LossConfig
from pipeline.data.read.batch import Batch
from pipeline.extras.models.tasks.reshaped_click import ReshapedClickTask
from pipeline.runtime.errors import ConfigError
from tests.extras.models.planted_logs import sigmoid
from tests.support.clicks import labelled
from tests.support.messages import names

TRUTH = sigmoid(np.linspace(-2.5, 1.0, 30))


def _fitted(loss: LossConfig, items: np.ndarray, batch: Batch) -> np.ndarray:
    """The probability that one logit for each item learns from all rows."""
    task = ReshapedClickTask(ModelConfig(), [], loss).train()
    logits = torch.zeros(len(TRUTH), requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        task(logits[torch.from_numpy(items)][:, None], batch)[0].backward()
        optimizer.step()
    return torch.sigmoid(logits.detach()).numpy()


def test_a_teacher_brings_a_student_of_few_rows_nearer_to_the_truth() -> None:
    random = np.random.default_rng(0)
    items = np.repeat(np.arange(len(TRUTH)), 20)
    labels = torch.from_numpy(random.random(len(items)) < TRUTH[items]).float()
    batch = replace(labelled(labels), aside=torch.from_numpy(TRUTH[items]).float()[:, None])
    errors = [
        np.abs(_fitted(loss, items, batch) - TRUTH).mean()
        for loss in (LossConfig(), LossConfig(teacher="t", teacher_weight=0.8))
    ]
    print("error without and with a teacher", errors)
    assert errors[1] < errors[0] / 3


def test_labels_that_come_late_are_learnt_as_if_they_had_come_at_once() -> None:
    """Each row is there without its label; positive rows come again."""
    random = np.random.default_rng(0)
    items = np.repeat(np.arange(len(TRUTH)), 2000)
    clicks = random.random(len(items)) < TRUTH[items]
    shown = np.concatenate([items, items[clicks]])
    labels = torch.from_numpy(np.concatenate([np.zeros(len(items)), np.ones(clicks.sum())])).float()
    errors = [
        np.abs(_fitted(loss, shown, labelled(labels)) - TRUTH).mean()
        for loss in (LossConfig(), LossConfig(fake_negatives=True))
    ]
    print("error without and with importance weights", errors)
    assert errors[1] < 0.01 and errors[0] > 0.08


def test_a_teacher_that_is_no_probability_makes_a_loss_that_names_its_row() -> None:
    batch = replace(labelled(torch.tensor([1.0, 0.0, 1.0])), aside=torch.tensor([[0.5], [1.5], [1.0]]))
    task = ReshapedClickTask(ModelConfig(), [], LossConfig(teacher="t")).train()
    loss, prediction = task(torch.zeros(3, 1), batch)
    assert not loss.isfinite() and task.losses(prediction).isfinite().tolist() == [True, False, True]
    assert task.eval()(torch.zeros(3, 1), batch)[0].isfinite()


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"teacher_weight": 0.0}, "trainer.loss.teacher_weight=0.0"), ({"teacher_weight": 1.5}, "teacher_weight=1.5 1")],
)
def test_bad_settings_are_refused(settings: dict[str, float], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=names(told)):
        LossConfig(teacher="t", **settings)  # type: ignore[arg-type]


def test_the_log_names_keys_of_every_kind() -> None:
    loss = LossConfig(teacher="t", fake_negatives=True, num_positions=9, pos_weight=2.0)
    told = "pos_weight=2 num_positions=9 teacher=t fake_negatives=true"
    assert loss.changes == ", ".join(f"trainer.loss.{word}" for word in told.split())
