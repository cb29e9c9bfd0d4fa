"""Metrics equal those of independent implementations, over any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from pipeline.data.quality import auc as numpy_auc
from pipeline.devices.cpu.host_exchange import connect
from pipeline.devices.process_group import init_distributed
from pipeline.models.tasks.click_metrics import Prediction, RunningMetrics, ScoreCollector, auprc
from tests.support.ranks import RankPool


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    return numpy_auc(scores.numpy(), labels.numpy())


def _draw(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, generator=generator).mul(4).round().div(4)  # many ties
    labels = (torch.rand(num_samples, generator=generator) < torch.sigmoid(logits - 1)).float()
    return logits, labels


def test_auc_counts_ties_half() -> None:
    assert auc(torch.tensor([1.0, 1.0]), torch.tensor([1, 0])) == 0.5
    assert auc(torch.tensor([2.0, 1.0, 1.0, 0.0]), torch.tensor([1, 1, 0, 0])) == pytest.approx(3.5 / 4)


def test_auc_and_auprc_agree_with_torchmetrics() -> None:
    logits, labels = _draw(20_000, seed=1)
    probabilities = torch.sigmoid(logits)
    assert auc(logits, labels) == pytest.approx(float(binary_auroc(probabilities, labels.long())), abs=1e-5)
    assert auprc(logits.numpy(), labels.numpy()) == pytest.approx(
        float(binary_average_precision(probabilities, labels.long())), abs=1e-5
    )


def test_auc_of_one_class_is_not_a_number() -> None:
    assert math.isnan(auc(torch.randn(5), torch.ones(5)))
    assert math.isnan(auc(torch.empty(0), torch.empty(0)))


def _metrics_of_a_share(rank: int, world_size: int, shared: bool) -> dict[str, float]:
    context = init_distributed()
    if shared:
        assert connect(context, 60.0) is not None
    logits, labels = _draw(4000, seed=2)
    weights = torch.ones(4000)
    weights[-37:] = 0.0  # padding, all of it on the last rank
    mine = slice(rank * 4000 // world_size, (rank + 1) * 4000 // world_size)
    running, scores = RunningMetrics(context, batch_size=500), ScoreCollector()
    for start in range(mine.start, mine.stop, 500):
        part = slice(start, start + 500)
        prediction = Prediction(torch.tensor(0.0), logits[part], labels[part], weights[part])
        running.update(prediction)
        scores.update(prediction)
    return {**running.compute(), **scores.compute(context)}


@pytest.mark.parametrize(("world_size", "shared"), [(1, False), (2, False), (2, True)])
def test_metrics_over_ranks_equal_hand_computed_ones_and_ignore_padding(
    ranks: RankPool, world_size: int, shared: bool
) -> None:
    logits, labels = (tensor[:-37].double() for tensor in _draw(4000, seed=2))
    probabilities, rate = torch.sigmoid(logits), labels.mean()
    logloss = -(labels * probabilities.log() + (1 - labels) * (1 - probabilities).log()).mean()
    entropy = -(rate * rate.log() + (1 - rate) * (1 - rate).log())
    expected = {
        "ne": float(logloss / entropy),
        "logloss": float(logloss),
        "calibration": float(probabilities.sum() / labels.sum()),
        "label_rate": float(rate),
        "auc": auc(logits, labels),
        "auprc": auprc(logits.numpy(), labels.numpy()),
        "num_samples": 4000 - 37,
    }
    for metrics in ranks.run(world_size, _metrics_of_a_share, world_size, shared):
        assert metrics == pytest.approx(expected, rel=1e-6)
