"""Measure scores against each label, and how much an artifact's scores differ from its model's scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.quality import auc, log_losses_of_scores, normalized_entropy
from pipeline.data.targets import Target


@dataclass(frozen=True)
class ServedTask:
    """A label that is scored: binary by its probability, regression by its value, ordinal by the
    expected bucket.

    `width`: how many numbers the layers output for it. An artifact with one binary label has no
    list of tasks.
    """

    name: str
    kind: str
    width: int = 1


def scores_of(tasks: list[ServedTask], outputs: torch.Tensor) -> torch.Tensor:
    """Return scores [batch, tasks] of outputs [batch, sum of widths], or of outputs [batch] without tasks."""
    if not tasks:
        return torch.sigmoid(outputs)
    parts = outputs.split([task.width for task in tasks], dim=1)
    return torch.stack([_score(task.kind, part) for task, part in zip(tasks, parts, strict=True)], dim=1)


def _score(kind: str, outputs: torch.Tensor) -> torch.Tensor:
    if kind == "regression":
        return outputs[:, 0]
    return torch.sigmoid(outputs).sum(1)


class Calibration(Protocol):
    """Maps the layers' outputs to calibrated outputs. The extra `score_calibration` has one."""

    def apply(self, outputs: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return float64 outputs of the same shape. values, offsets: the ids of the same rows, as in
        a KeyedJaggedTensor of the artifact's features."""

    def to_bytes(self) -> bytes:
        """Return the content of the artifact's file."""


def width_of(tasks: list[ServedTask]) -> int | None:
    """Return the number of columns of the layers' outputs; None if the outputs are [batch]."""
    return sum(task.width for task in tasks) if tasks else None


Floats = NDArray[np.float64]


class LabelledRows(NamedTuple):
    """labels and weights [rows, targets] float64. A weight is 0 if the label does not count in the row."""

    targets: list[Target]
    labels: Floats
    weights: Floats


@dataclass(frozen=True)
class Quality:
    """The quality for one label. ne: log loss divided by the entropy of the label rate (He et al.
    2014); if the label is not binary, squared error divided by its variance. NaN if all labels
    are equal; auc also if the label is not binary.
    """

    ne: float
    auc: float


@dataclass(frozen=True)
class Parity:
    """The artifact compared with the trained model on the same rows; the deltas are artifact - model.

    Differences of scores are in standard deviations of the label if it is not binary. With several
    labels, each number is the worst of all labels, ne and auc are the main label's, and `tasks` has
    each label separately.
    """

    rows: int
    max_score_difference: float
    mean_score_difference: float
    ne: float
    ne_delta: float
    auc: float
    auc_delta: float
    tasks: dict[str, Parity] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the values, without `tasks` if there is one label."""
        values = {key: value for key, value in vars(self).items() if key != "tasks"}
        return values | ({"tasks": {name: each.as_dict() for name, each in self.tasks.items()}} if self.tasks else {})


def measures(ne: float, auc: float) -> dict[str, str]:
    """Return field -> title for the two measures of quality: NE and AUC, or MSE divided by variance."""
    if math.isnan(ne):
        return {}
    return {"ne": "MSE/variance"} if math.isnan(auc) else {"ne": "NE", "auc": "AUC"}


def quality(kind: str, scores: Floats, labels: Floats, weights: Floats) -> Quality:
    """Return the quality of scores [rows], labels [rows] and weights [rows]. Scores of binary
    labels are in (0, 1). The measures are the same as `evaluate`'s: rows of weight 0 are left
    out, and both measures are weighted.
    """
    counted = weights > 0
    scores, labels, weights = scores[counted], labels[counted], weights[counted]
    if kind == "binary":
        return Quality(
            normalized_entropy(log_losses_of_scores(scores, labels), labels, weights), auc(scores, labels, weights)
        )
    variance = _variance(labels, weights)
    squared_error = float(np.average(np.square(scores - labels), weights=weights)) if variance else math.nan
    return Quality(squared_error / variance if variance else math.nan, math.nan)


def _variance(labels: Floats, weights: Floats) -> float:
    """Return the weighted variance of the labels; 0 if no row has a weight above 0."""
    if not weights.any():
        return 0.0
    return float(np.average(np.square(labels - np.average(labels, weights=weights)), weights=weights))


def qualities(rows: LabelledRows, scores: Floats) -> list[Quality]:
    """Return the quality of each target for scores [rows, targets], on the rows in which the target counts."""
    return [
        quality(target.kind, scores[:, number], rows.labels[:, number], rows.weights[:, number])
        for number, target in enumerate(rows.targets)
    ]


def compare(model: Floats, artifact: Floats, rows: LabelledRows, of_model: Sequence[Quality]) -> Parity:
    """Compare scores [rows, targets] of two models for the same rows in the same order."""
    found = {}
    for number, (target, before, now) in enumerate(zip(rows.targets, of_model, qualities(rows, artifact), strict=True)):
        difference, weights = np.abs(artifact[:, number] - model[:, number]), rows.weights[:, number]
        if target.kind != "binary":
            difference = difference / (math.sqrt(_variance(rows.labels[:, number], weights)) or 1.0)
        largest = float(difference.max()) if len(difference) else 0.0
        mean = float(np.average(difference, weights=weights)) if weights.any() else 0.0
        found[target.name] = Parity(
            len(difference), largest, mean, now.ne, now.ne - before.ne, now.auc, now.auc - before.auc
        )
    return next(iter(found.values())) if len(found) == 1 else _worst(found)


def _worst(found: dict[str, Parity]) -> Parity:
    """Return the worst number, ignoring NaN, which occurs if all labels are equal."""

    def most(name: str, sign: float = 1.0) -> float:
        numbers = [sign * value for parity in found.values() if math.isfinite(value := getattr(parity, name))]
        return sign * max(numbers, default=math.nan)

    main = next(iter(found.values()))
    return Parity(
        main.rows, most("max_score_difference"), most("mean_score_difference"), main.ne, most("ne_delta"), main.auc,
        most("auc_delta", -1.0), found,
    )  # fmt: skip
