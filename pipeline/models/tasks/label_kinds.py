"""Define the loss and the metrics for each kind of label.

binary: a logit, cross-entropy. regression: a value, squared error. ordinal: for each bucket except
the first, the logit of "this bucket or a later bucket" (Frank and Hall 2001); the cross-entropies
are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipeline.data.targets import Target
from pipeline.models.tasks.click import ClickMeasure
from pipeline.models.tasks.click_metrics import Prediction, RunningMetrics
from pipeline.runtime.process.distributed import DistributedContext


def losses_of(target: Target, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the unweighted losses [B] of outputs [B, target.width] and labels [B]."""
    if target.kind == "binary":
        return F.binary_cross_entropy_with_logits(outputs[:, 0], labels, reduction="none")
    if target.kind == "regression":
        return (outputs[:, 0] - labels).square()
    return F.binary_cross_entropy_with_logits(outputs, passed_buckets(labels, target.width), reduction="none").mean(1)


def passed_buckets(labels: torch.Tensor, width: int) -> torch.Tensor:
    """Map buckets [B] to [B, width] float32: 1 if the bucket is k + 1 or later."""
    # Not torch.arange, because TorchRec traces this with torch.fx, where labels have no device.
    return torch.stack([(labels > bucket).float() for bucket in range(width)], dim=1)


class TargetPrediction(NamedTuple):
    """Detached tensors: outputs [B, width], labels and sample_weights [B]."""

    loss: torch.Tensor  # scalar, of the batch and all targets
    outputs: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor

    def as_click(self) -> Prediction:
        return Prediction(self.loss, self.outputs[:, 0].contiguous(), self.labels, self.sample_weights)


class BinaryTargetMeasure:
    """Measure NE, log loss, calibration and label rate; in an evaluation also AUC and AUPRC."""

    def __init__(self, measure: RunningMetrics | ClickMeasure) -> None:
        self._measure = measure

    def update(self, prediction: TargetPrediction) -> None:
        self._measure.update(prediction.as_click())

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        return self._measure.compute()


class SumsMeasure:
    """Measure metrics of weighted float64 sums over rows, which are added up over ranks."""

    def __init__(
        self,
        context: DistributedContext,
        sums: Callable[[TargetPrediction], torch.Tensor],
        metrics: Callable[[list[float]], dict[str, float]],
        starts_anew: bool,
    ) -> None:
        """sums: of a batch [n]. metrics: of all sums. starts_anew: after each compute()."""
        self._context, self._sums_of, self._metrics, self._starts_anew = context, sums, metrics, starts_anew
        self._sums: torch.Tensor | None = None
        self._num_samples = 0

    def update(self, prediction: TargetPrediction) -> None:
        rows = prediction.sample_weights > 0
        self._num_samples += int(rows.sum())
        kept = (part.double()[rows] for part in prediction[1:])
        sums = self._sums_of(TargetPrediction(prediction.loss, *kept)).cpu()
        self._sums = sums if self._sums is None else self._sums + sums

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        assert self._sums is not None, "no batch was measured"
        total = torch.cat([self._sums, torch.tensor([float(self._num_samples)], dtype=torch.float64)])
        total = total.to(self._context.device)
        if self._context.world_size > 1:
            dist.all_reduce(total)
        if self._starts_anew:
            self._sums, self._num_samples = torch.zeros_like(self._sums), 0
        *sums, num_samples = total.tolist()
        return {**self._metrics(sums), "num_samples": int(num_samples)}


def _regression_sums(prediction: TargetPrediction) -> torch.Tensor:
    _, outputs, labels, weights = prediction
    error = outputs[:, 0] - labels
    parts = [weights, weights * error.square(), weights * error.abs(), weights * labels, weights * labels.square(), weights * outputs[:, 0]]  # fmt: skip
    return torch.stack([part.sum() for part in parts])


def _regression_metrics(sums: list[float]) -> dict[str, float]:
    """Return mse, mae, r2 (1 - mse / variance of the label) and means; NaN if no row counts."""
    weight, squares, absolutes, labels, label_squares, outputs = (_ratio(each, sums[0]) for each in sums)
    variance = label_squares - labels**2
    return {
        "mse": squares,
        "mae": absolutes,
        "r2": 1.0 - _ratio(squares, variance) if weight else math.nan,
        "mean_prediction": outputs,
        "label_mean": labels,
    }


def _ordinal_sums(prediction: TargetPrediction) -> torch.Tensor:
    _, outputs, labels, weights = prediction
    passed = (labels.unsqueeze(1) > torch.arange(outputs.shape[1], device=labels.device)).double()
    losses = F.binary_cross_entropy_with_logits(outputs, passed, reduction="none")
    error = (torch.sigmoid(outputs).sum(1) - labels).abs()
    rows = torch.stack([weights.sum(), (weights * error).sum(), (weights[:, None] * losses).sum()])
    return torch.cat([rows, (weights[:, None] * passed).sum(0)])


def _ordinal_metrics(sums: list[float]) -> dict[str, float]:
    """Return ne (log loss of all thresholds over their entropy) and mae of the expected bucket."""
    weight, absolutes, losses, *passed = sums
    rates = [_ratio(each, weight) for each in passed]
    entropy = sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in rates if 0.0 < p < 1.0)
    return {"ne": _ratio(_ratio(losses, weight), entropy), "mae": _ratio(absolutes, weight), "label_mean": sum(rates)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


TargetMeasure = BinaryTargetMeasure | SumsMeasure


def training_measure(target: Target, context: DistributedContext, batch_size: int, window: int) -> TargetMeasure:
    if target.kind == "binary":
        return BinaryTargetMeasure(RunningMetrics(context, batch_size, window))
    return _sums_measure(target, context, starts_anew=True)


def evaluation_measure(target: Target, context: DistributedContext, batch_size: int) -> TargetMeasure:
    if target.kind == "binary":
        return BinaryTargetMeasure(ClickMeasure(context, batch_size))
    return _sums_measure(target, context, starts_anew=False)


def _sums_measure(target: Target, context: DistributedContext, starts_anew: bool) -> SumsMeasure:
    if target.kind == "regression":
        return SumsMeasure(context, _regression_sums, _regression_metrics, starts_anew)
    return SumsMeasure(context, _ordinal_sums, _ordinal_metrics, starts_anew)
