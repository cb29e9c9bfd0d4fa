"""Measure exactly how well scores rank labels and predict their probability: AUC, log loss, and
normalized entropy (NE).

NE is the log loss divided by the entropy of the label rate (He et al. 2014, section 3). Training's
running NE over ranks is TorchRec's, with the same definition.

Every measure takes the rows' sample weights: a row of weight 2 counts as two equal rows. Use these
functions wherever rows are summed. docs/explain/weights.md lists all sums over rows.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MIN_PROBABILITY = 1e-12


def ranked_groups(
    scores: NDArray[np.floating], labels: NDArray[np.number], weights: NDArray[np.floating] | None = None
) -> tuple[Floats, Floats]:
    """Return two arrays with one entry for each group of equal scores, highest score first: the
    weight of its positives, and the weight of all its rows. weights: 1 by default.
    """
    order = np.argsort(scores)[::-1]
    ordered = scores[order]
    begins = np.append(0, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)
    del ordered
    counted = np.ones(len(order)) if weights is None else weights[order].astype(np.float64)
    sizes: Floats = np.add.reduceat(counted, begins)
    positives: Floats = np.add.reduceat(counted * labels[order], begins)
    return positives, sizes


def auc(scores: NDArray[np.floating], labels: NDArray[np.number], weights: NDArray[np.floating] | None = None) -> float:
    """Return the area under the ROC curve of scores [n] and labels 0 or 1 [n]. Ties count half
    (Mann-Whitney U / (P N)).

    NaN if all labels are equal. Without weights the sums are of whole and half numbers, so the
    order of rows makes no difference below 2**52 pairs.
    """
    if not len(scores):
        return math.nan
    positives, sizes = ranked_groups(scores, labels, weights)
    negatives = sizes - positives
    pairs = positives.sum() * negatives.sum()
    above = positives.cumsum() - positives
    return float((negatives * (above + positives / 2)).sum() / pairs) if pairs else math.nan


def log_losses(logits: NDArray[np.floating], labels: NDArray[np.floating]) -> Floats:
    """Return [n] log losses in nats."""
    wide: Floats = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaN of a training that has diverged
        losses: Floats = np.logaddexp(0.0, wide) - labels * wide
    return losses


def probabilities(logits: NDArray[np.floating]) -> Floats:
    """Return [n] predicted probabilities. It does not overflow for logits of any size."""
    with np.errstate(invalid="ignore"):
        scores: Floats = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
    return scores


def log_losses_of_scores(scores: Floats, labels: NDArray[np.floating]) -> Floats:
    """Return [n] log losses in nats from probabilities."""
    clipped = np.clip(scores, MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    losses: Floats = -(labels * np.log(clipped) + (1 - labels) * np.log1p(-clipped))
    return losses


def normalized_entropy(
    losses: Floats, labels: NDArray[np.number], weights: NDArray[np.floating] | None = None
) -> float:
    """Return NE from log losses [n], labels and weights (1 by default); NaN if all labels are
    equal."""
    if not len(labels):
        return math.nan
    rate, loss = (float(np.average(values, weights=weights)) for values in (labels, losses))
    return float(loss / binary_entropy(rate)) if 0.0 < rate < 1.0 else math.nan


def binary_entropy(rate: float) -> float:
    """Return the entropy in nats."""
    return float(-rate * np.log(rate) - (1.0 - rate) * np.log1p(-rate))
