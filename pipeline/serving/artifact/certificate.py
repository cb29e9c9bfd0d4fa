"""Turn two lists of scores into how far they lie apart, and into a verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.serving import ParityConfig
from pipeline.data.quality import auc, log_losses_of_scores, normalized_entropy


@dataclass(frozen=True)
class Quality:
    """ne: logloss over the entropy of the label rate (Ad click prediction, He et al. 2014); both NaN for labels of one kind."""

    ne: float
    auc: float


@dataclass(frozen=True)
class Parity:
    """The artifact beside the trained model on the same rows; the deltas are artifact - model."""

    rows: int
    max_score_difference: float
    mean_score_difference: float
    ne: float
    ne_delta: float
    auc: float
    auc_delta: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def quality(scores: NDArray[np.float64], labels: NDArray[np.float64]) -> Quality:
    """scores [n] within (0, 1), labels [n]."""
    return Quality(normalized_entropy(log_losses_of_scores(scores, labels), labels), auc(scores, labels))


def compare(
    model: NDArray[np.float64], artifact: NDArray[np.float64], labels: NDArray[np.float64], model_quality: Quality
) -> Parity:
    """Scores of the same rows in the same order."""
    difference = np.abs(artifact - model)
    mine = quality(artifact, labels)
    largest, mean = (float(difference.max()), float(difference.mean())) if len(difference) else (0.0, 0.0)
    return Parity(
        len(labels), largest, mean, mine.ne, mine.ne - model_quality.ne, mine.auc, mine.auc - model_quality.auc
    )  # fmt: skip


def excesses(found: dict[str, Parity], limits: ParityConfig) -> list[str]:
    """A line for each limit that a split passes, with both numbers."""
    lines = []
    for split, parity in found.items():
        checks = [
            ("NE", "rises by", parity.ne_delta, "max_ne_increase", limits.max_ne_increase),
            ("AUC", "falls by", -parity.auc_delta, "max_auc_decrease", limits.max_auc_decrease),
            ("a score", "moves by", parity.max_score_difference, "max_score_difference", limits.max_score_difference),
        ]
        lines += [
            f"{split}: {what} {moves} {value:.3g}, parity.{name} allows {limit:g}"
            for what, moves, value, name, limit in checks
            if value > limit  # NaN, where labels are of one kind, is no excess
        ]
    return lines
