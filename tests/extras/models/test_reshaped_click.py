"""Losses of one binary label by keys: they equal their formulas, resume bit for bit, and leave the metrics alone."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.model import ModelConfig
from pipeline.config.training import LossConfig
from pipeline.extras.models.tasks.reshaped_click import ReshapedClickTask
from pipeline.models.tasks.click import ClickTask
from pipeline.models.tasks.task import make_task
from pipeline.runtime.errors import ConfigError
from tests.models.every_model import small
from tests.support.clicks import labelled
from tests.support.jobs import evaluate_on_rank, train_on_rank
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.support.stored_tensors import stored_tensors

DRAW = torch.Generator().manual_seed(0)
LOGITS = 5 * torch.randn(200, generator=DRAW, dtype=torch.float64)
LABELS = (torch.rand(200, generator=DRAW) < 0.3).double()
WEIGHTS = 3 * torch.rand(200, generator=DRAW, dtype=torch.float64)


def _cross_entropy(smoothing: float = 0.0, pos_weight: float = 1.0) -> torch.Tensor:
    smooth, weight = LABELS * (1 - smoothing) + smoothing / 2, torch.tensor(pos_weight).double()
    return F.binary_cross_entropy_with_logits(LOGITS, smooth, WEIGHTS, reduction="none", pos_weight=weight)


def _focal(gamma: float, alpha: float) -> torch.Tensor:
    """The formula of arXiv 1708.02002, equation 5."""
    right = torch.where(LABELS > 0, torch.sigmoid(LOGITS), 1 - torch.sigmoid(LOGITS))
    return -WEIGHTS * torch.where(LABELS > 0, alpha, 1 - alpha) * (1 - right) ** gamma * right.log()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (LossConfig(label_smoothing=0.1), _cross_entropy(smoothing=0.1)),
        (LossConfig(pos_weight=4.0), _cross_entropy(pos_weight=4.0)),
        (LossConfig(focal_gamma=1.5), 2 * _focal(1.5, 0.5)),
        (LossConfig(focal_gamma=0.5, focal_alpha=0.25), _focal(0.5, 0.25)),
    ],
    ids=["smoothing", "pos_weight", "gamma", "alpha"],
)
def test_a_loss_equals_its_formula(loss: LossConfig, expected: torch.Tensor) -> None:
    task = ReshapedClickTask(ModelConfig(), [], loss)
    mean, prediction = task(LOGITS[:, None], labelled(LABELS.float(), WEIGHTS.float()))
    torch.testing.assert_close(task.losses(prediction).double(), expected, rtol=1e-5, atol=1e-6)
    assert mean.item() == pytest.approx(expected.mean().item(), rel=1e-6)


def test_without_a_change_the_loss_is_the_plain_log_loss_bit_for_bit() -> None:
    tasks = ReshapedClickTask(ModelConfig(), [], LossConfig()), ClickTask(ModelConfig(), [])
    batch = labelled(LABELS.float(), WEIGHTS.float())
    neutral, plain = (task.losses(task(LOGITS[:, None], batch)[1]) for task in tasks)
    assert torch.equal(neutral, plain)
    words = ["label_smoothing=0", "pos_weight=1", "focal_gamma=0", "focal_alpha=null"]
    given = load_config(TrainJob, ["data=quickstart", *(f"trainer.loss.{word}" for word in words)]).trainer.loss
    assert type(make_task(small("fm"), torch.nn.Identity(), [], loss=given).task) is ClickTask
    changed = LossConfig(pos_weight=2.0)
    assert type(make_task(small("fm"), torch.nn.Identity(), [], loss=changed).task) is ReshapedClickTask


def test_gradients_of_sure_rows_are_finite_at_a_small_gamma() -> None:
    logits = torch.tensor([200.0, -200.0]).requires_grad_()
    task = ReshapedClickTask(ModelConfig(), [], LossConfig(focal_gamma=0.5))
    task(logits[:, None], labelled(torch.tensor([1.0, 0.0])))[0].backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("label_smoothing=1", "label_smoothing=1.0 1"),
        ("pos_weight=0", "pos_weight=0.0 above 0"),
        ("pos_weight=inf", "pos_weight=inf finite"),
        ("focal_gamma=-1", "focal_gamma=-1.0 at least 0"),
        ("focal_alpha=1", "focal_alpha=1.0 below 1"),
        ("pos_weight=3 focal_alpha=0.25", "pos_weight=3.0 focal_alpha=0.25"),
    ],
)
def test_bad_values_are_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError, match=names(told)):
        load_config(TrainJob, ["data=quickstart", *(f"trainer.loss.{word}" for word in words.split())])


def test_a_model_of_several_labels_refuses_the_keys() -> None:
    with pytest.raises(ConfigError, match=names("trainer.loss.pos_weight=3 model=mmoe")):
        make_task(small("mmoe"), torch.nn.Identity(), [], loss=LossConfig(pos_weight=3.0))


@pytest.mark.long
def test_a_changed_loss_resumes_bit_for_bit_and_is_not_measured(
    ranks: RankPool, prepared_clicks: str, tmp_path: Path
) -> None:
    words = ["experiment=quickstart", "hardware=cpu", "trainer.global_batch_size=256", f"data.path={prepared_clicks}",
             "trainer.evaluate_max_batches=2", "logger.report=false", "logger.tensorboard=false", "trainer.loss.pos_weight=5", "trainer.loss.label_smoothing=0.1",
             "trainer.loss.focal_gamma=1.5"]  # fmt: skip
    cut, whole = ([*words, f"run_dir={tmp_path}/{name}", "trainer.max_steps=5"] for name in ("cut", "whole"))
    ranks.run(2, train_on_rank, [*cut, "trainer.max_steps=3"])
    resumed, uninterrupted = (ranks.run(2, train_on_rank, job)[0] for job in (cut, whole))
    weights, expected = stored_tensors(resumed.checkpoint), stored_tensors(uninterrupted.checkpoint)
    assert weights == expected
    plain = tmp_path / "plain"  # the same weights in a run whose config has the plain log loss
    shutil.copytree(tmp_path / "whole", plain)
    config = yaml.safe_load((plain / "config.yaml").read_text())
    assert config["trainer"]["loss"] == asdict(LossConfig(0.1, 5.0, 1.5))
    del config["trainer"]["loss"]
    (plain / "config.yaml").write_text(yaml.safe_dump(config))
    measured = ranks.run(
        2, evaluate_on_rank, [f"run={plain}", "split=validation", "max_batches=2", "global_batch_size=256"]
    )[0].metrics
    assert measured == uninterrupted.validation
