"""Losses of regression labels: they equal their formulas, find planted quantiles and means, and are measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.config.columns import LabelConfig
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import load_saved_job
from pipeline.runtime.errors import ConfigError
from tests.extras.models.planted_logs import job, measured, prepared, train_on
from tests.support.messages import names
from tests.support.ranks import RankPool

DRAW = torch.Generator().manual_seed(0)
OUTPUTS, VALUES = (4 * torch.randn(100, generator=DRAW, dtype=torch.float64) for _ in range(2))
MISSING = VALUES - OUTPUTS


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"kind": "huber", "delta": 1.5}, F.huber_loss(OUTPUTS, VALUES, delta=1.5, reduction="none")),
        ({"kind": "log"}, (OUTPUTS.sign() * OUTPUTS.abs().log1p() - VALUES.sign() * VALUES.abs().log1p()) ** 2),
        ({"kind": "quantile", "at": 0.8}, torch.where(MISSING > 0, 0.8 * MISSING, -0.2 * MISSING)),
    ],
)
def test_a_loss_equals_its_formula(loss: dict[str, object], expected: torch.Tensor) -> None:
    torch.testing.assert_close(LabelConfig("regression", loss=loss).read_loss()(OUTPUTS, VALUES), expected)


def test_outputs_of_0_have_a_gradient() -> None:
    outputs = torch.zeros(1, requires_grad=True)
    LabelConfig("regression", loss={"kind": "log"}).read_loss()(outputs, torch.ones(1)).sum().backward()
    assert outputs.grad is not None and outputs.grad.item() < 0


@pytest.mark.parametrize(
    ("kind", "loss", "told"),
    [
        ("binary", {"kind": "huber"}, "labels.loss huber kind=binary"),
        ("regression", {"kind": "hubber"}, "labels.loss.kind='hubber' huber"),
        ("regression", {"delta": 2}, "labels.loss.kind=''"),
        ("regression", {"kind": "huber", "delta": 0}, "labels.loss.delta=0 above 0"),
        ("regression", {"kind": "quantile", "at": 1.0}, "labels.loss.at=1.0"),
        ("regression", {"kind": "quantile", "q": 0.5}, "labels.loss.q kind=quantile at"),
    ],
)
def test_bad_settings_are_refused(kind: str, loss: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=names(told)):
        LabelConfig(kind, loss=loss)


@pytest.mark.long
def test_a_run_finds_a_planted_quantile_and_is_measured_by_its_loss(ranks: RankPool, tmp_path: Path) -> None:
    of_label = ["data.columns.label=seconds", "optimizer.dense.lr=0.3", "optimizer.sparse.lr=0.3", "trainer.epochs=3"]
    quantile = ", loss: {kind: quantile, at: 0.8}"
    summary = train_on(ranks, 2, job(prepared(tmp_path), tmp_path / "run", *of_label, loss=quantile))
    metrics, labels, scores = measured(ranks, tmp_path / "run")
    assert np.mean(labels <= scores) == pytest.approx(0.8, abs=0.04)
    missing = labels - scores
    assert metrics["loss"] == pytest.approx(np.maximum(0.8 * missing, -0.2 * missing).mean(), rel=1e-4)
    assert summary.validation["loss"] == pytest.approx(metrics["loss"], rel=1e-4)
    saved = load_saved_job(TrainJob, f"{summary.run_dir}/config.yaml")
    assert isinstance(saved, TrainJob) and saved.best_metric == "loss"
