"""Train labels of any kind and number: a weighted sum of losses, and metrics by label.

A binary label has one logit and cross-entropy. A regression label has one value and squared error,
or a registered loss (data.columns.labels.<name>.loss).
An ordinal label has for each bucket except the first the logit of "this bucket or a later bucket"
(Frank and Hall 2001), and the mean of their cross-entropies. A label of classes has a target for
each class, whose outputs are logits of the softmax's probabilities, and the softmax's cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.data.read.batch import Batch
from pipeline.data.targets import Target
from pipeline.embeddings.table import Table
from pipeline.models.tasks.click import ClickMeasure
from pipeline.models.tasks.click_metrics import Prediction, RunningMetrics
from pipeline.models.tasks.task import Measure
from pipeline.runtime.process.distributed import DistributedContext


class LabelsPrediction(NamedTuple):
    """Hold detached tensors: outputs [B, sum of widths], labels and sample_weights [B, targets], losses [B]."""

    loss: torch.Tensor  # scalar
    outputs: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor
    losses: torch.Tensor


@register("task", "labels")
class LabelsTask(nn.Module):
    """Compute the sum over targets of weight * loss. The loss is a mean over all rows; masked rows
    add 0.

    So a step is the same for any number of ranks. A target with few unmasked rows has less
    influence, which `weight` may compensate.
    """

    no_export = ""
    takes_targets = True

    def __init__(self, config: ModelConfig, tables: list[Table], targets: list[Target]) -> None:
        super().__init__()
        self.targets = targets
        ends = [sum(target.width for target in targets[: number + 1]) for number in range(len(targets))]
        # Learnt logarithms of losses' variances (Kendall et al., CVPR 2018). None: given weights.
        learns_weights = getattr(config, "uncertainty_weights", False)
        self._heads = [target.label or target.name for target in targets]
        self.log_variances = nn.Parameter(torch.zeros(len(set(self._heads)))) if learns_weights else None
        self._columns = [slice(end - target.width, end) for end, target in zip(ends, targets, strict=True)]

    def forward(self, outputs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, LabelsPrediction]:
        """outputs: [B, sum of widths], in the order of the targets; the main target is first."""
        outputs = outputs.float()
        labels, weights = (part.reshape(-1, len(self.targets)) for part in (batch.labels, batch.sample_weights))
        parts = [outputs[:, columns] for columns in self._columns]
        if self.training:  # rows were sampled in training; the model's logits describe all rows
            parts = [
                part + target.train_offset if target.train_offset else part
                for part, target in zip(parts, self.targets, strict=True)
            ]
        losses = self.losses_of_targets(parts, labels, weights)
        loss = self.total(losses)
        rows = torch.stack([each.detach() for each in losses]).sum(0)
        return loss, LabelsPrediction(loss.detach(), outputs.detach(), labels, weights, rows)

    def losses_of_targets(
        self, outputs: list[torch.Tensor], labels: torch.Tensor, weights: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the losses [B] of each target, multiplied by the weights of the target and of the rows."""
        return [
            target.weight * weights[:, number] * losses_of(target, outputs[number], labels[:, number])
            for number, target in enumerate(self.targets)
        ]

    def total(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the labels' mean losses. With learnt s, each is exp(-s) * loss + s / 2."""
        of_heads: dict[str, torch.Tensor] = {}
        for head, each in zip(self._heads, losses, strict=True):
            of_heads[head] = of_heads[head] + each.mean() if head in of_heads else each.mean()
        means = torch.stack(list(of_heads.values()))
        if self.log_variances is None:
            return means.sum()
        return (torch.exp(-self.log_variances) * means + self.log_variances / 2).sum()

    def losses(self, prediction: LabelsPrediction) -> torch.Tensor:
        """Return the loss of each row [batch]."""
        return prediction.losses

    def clicks(self, prediction: LabelsPrediction) -> dict[str, Prediction]:
        """Return binary targets' predictions by the prefix of their metrics, to rank within groups."""
        return {
            prefix: self.of_target(prediction, number).as_click()
            for number, (prefix, target) in enumerate(zip(self.prefixes, self.targets, strict=True))
            if target.kind == "binary"
        }

    def numbers(self, prediction: LabelsPrediction) -> dict[str, Prediction]:
        """Return the predictions of targets that are not binary; their logits are the predicted value
        of a regression, and the expected bucket of an ordinal label.
        """
        found = {}
        for number, (prefix, target) in enumerate(zip(self.prefixes, self.targets, strict=True)):
            if target.kind != "binary":
                loss, outputs, labels, weights = self.of_target(prediction, number)
                values = outputs[:, 0] if target.kind == "regression" else torch.sigmoid(outputs).sum(1)
                found[prefix] = Prediction(loss, values, labels, weights)
        return found

    def of_target(self, prediction: LabelsPrediction, number: int) -> TargetPrediction:
        return TargetPrediction(
            prediction.loss,
            prediction.outputs[:, self._columns[number]],
            prediction.labels[:, number],
            prediction.sample_weights[:, number],
        )

    def number_of(self, name: str | None) -> int:
        """Return the position of the target with this name. None: the main target, which is first."""
        return 0 if name is None else [target.name for target in self.targets].index(name)

    @property
    def prefixes(self) -> list[str]:
        """Return the prefixes of the metrics' names: <label>/, or an empty prefix if there is one label."""
        return [f"{target.name}/" for target in self.targets] if len(self.targets) > 1 else [""]

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        measures = [training_measure(target, context, batch_size, window_samples) for target in self.targets]
        return LabelsMeasure(self, measures)

    def evaluation_measure(self, context: DistributedContext, batch_size: int) -> Measure:
        return LabelsMeasure(self, [evaluation_measure(target, context, batch_size) for target in self.targets])


class LabelsMeasure:
    """Measure each target's metrics, named <label>/<metric> if there are several targets."""

    def __init__(self, task: LabelsTask, measures: list[TargetMeasure]) -> None:
        self._task, self._measures = task, measures

    def update(self, prediction: LabelsPrediction) -> None:
        for number, measure in enumerate(self._measures):
            measure.update(self._task.of_target(prediction, number))

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics of all targets. num_samples is the largest number of any target."""
        found: dict[str, float] = {}
        for prefix, measure in zip(self._task.prefixes, self._measures, strict=True):
            found |= {prefix + name: value for name, value in measure.compute().items()}
        counts = [value for name, value in found.items() if name.endswith("num_samples")]
        return found | ({"num_samples": max(counts)} if counts else {})


def losses_of(target: Target, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the unweighted losses [B] of outputs [B, target.width] and labels [B]."""
    if target.value is not None:  # -log(probability) of the label's class; the other classes add 0
        return labels * F.softplus(-outputs[:, 0])
    if target.kind == "binary":
        return F.binary_cross_entropy_with_logits(outputs[:, 0], labels, reduction="none")
    if target.kind == "regression":
        error = outputs[:, 0] - labels
        return error.square() if target.loss is None else target.loss(outputs[:, 0], labels)
    return F.binary_cross_entropy_with_logits(outputs, passed_buckets(labels, target.width), reduction="none").mean(1)


def passed_buckets(labels: torch.Tensor, width: int) -> torch.Tensor:
    """Map buckets [B] to [B, width] float32: column k is 1 if the bucket is k + 1 or later."""
    # Not torch.arange, because TorchRec traces this with torch.fx, where labels have no device.
    return torch.stack([(labels > bucket).float() for bucket in range(width)], dim=1)


class TargetPrediction(NamedTuple):
    """Hold detached tensors: outputs [B, width], labels and sample_weights [B]."""

    loss: torch.Tensor  # scalar, of the batch and all targets
    outputs: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor

    def as_click(self) -> Prediction:
        return Prediction(self.loss, self.outputs[:, 0].contiguous(), self.labels, self.sample_weights)


class BinaryTargetMeasure:
    """Measure NE, log loss, calibration and label rate. An evaluation also measures AUC and AUPRC."""

    def __init__(self, measure: RunningMetrics | ClickMeasure) -> None:
        self._measure = measure

    def update(self, prediction: TargetPrediction) -> None:
        self._measure.update(prediction.as_click())

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        return self._measure.compute()


class SumsMeasure:
    """Measure metrics that are computed from weighted float64 sums over the rows of all ranks."""

    def __init__(
        self,
        context: DistributedContext,
        sums: Callable[[TargetPrediction], torch.Tensor],
        metrics: Callable[[list[float]], dict[str, float]],
        starts_anew: bool,
    ) -> None:
        """sums: returns a batch's sums [n]. metrics: returns metrics of the total sums.
        starts_anew: reset in compute().
        """
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


def _regression_sums(target: Target, prediction: TargetPrediction) -> torch.Tensor:
    _, outputs, labels, weights = prediction
    error = outputs[:, 0] - labels
    parts = [weights, weights * error.square(), weights * error.abs(), weights * labels, weights * labels.square(), weights * outputs[:, 0], weights * losses_of(target, outputs, labels)]  # fmt: skip
    return torch.stack([part.sum() for part in parts])


def _regression_metrics(target: Target, sums: list[float]) -> dict[str, float]:
    """Return mse, mae, r2 (1 - mse / variance of the label) and means; NaN if no row counts.
    If the target has a `loss`, also return its mean."""
    weight, squares, absolutes, labels, label_squares, outputs, loss = (_ratio(each, sums[0]) for each in sums)
    variance = label_squares - labels**2
    return ({"loss": loss} if target.loss is not None else {}) | {
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
    """Return ne (log loss of all thresholds divided by their entropy) and mae of the expected bucket."""
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
        sums, metrics = partial(_regression_sums, target), partial(_regression_metrics, target)
        return SumsMeasure(context, sums, metrics, starts_anew)
    return SumsMeasure(context, _ordinal_sums, _ordinal_metrics, starts_anew)
