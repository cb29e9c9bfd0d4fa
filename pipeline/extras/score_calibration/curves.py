"""Fit strictly increasing curves from the model's logits to calibrated logits.

A curve is piecewise linear: points (x, y), and beyond the first and the last point a line with
`slope`. Because it is strictly increasing, rows keep their order.

Platt scaling: Platt 1999, Probabilistic Outputs for Support Vector Machines, with the targets of
its section 2.2, which keep the curve finite if the logits separate the labels. Isotonic: blocks of
pooled adjacent violators, joined by lines between the blocks' means instead of steps (centered
isotonic regression: Oron and Flournoy 2017, https://arxiv.org/abs/1701.05964).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, minimize
from scipy.special import expit, logit

Floats = NDArray[np.float64]
# The share of the model's own logit in an isotonic curve. Without it a curve could be so flat that
# rows with different logits get the same score.
OWN_SHARE = 1e-3


@dataclass(frozen=True)
class Curve:
    """`x` and `y` ascend strictly, and have at least one point."""

    x: list[float]
    y: list[float]
    slope: float


def fit_curve(kind: str, logits: Floats, labels: Floats, weights: Floats) -> Curve | None:
    """Return the curve of kind platt or isotonic for rows of positive weight; None if all labels are
    equal, or if higher logits have fewer positive labels."""
    weights = weights / weights.mean()  # only their ratios matter
    rate = float(np.average(labels, weights=weights))
    if not 0.0 < rate < 1.0:
        return None
    return _platt(logits, labels, weights) if kind == "platt" else _isotonic(logits, labels, weights, rate)


def _platt(logits: Floats, labels: Floats, weights: Floats) -> Curve | None:
    positives, total = float(weights @ labels), float(weights.sum())
    high, low = (positives + 1) / (positives + 2), 1 / (total - positives + 2)
    targets = labels * high + (1 - labels) * low
    centre, scale = float(logits.mean()), float(logits.std()) or 1.0
    scaled = (logits - centre) / scale

    def loss(line: Floats) -> tuple[float, Floats]:
        found = line[0] * scaled + line[1]
        excess = weights * (expit(found) - targets)
        gradient = np.array([excess @ scaled, excess.sum()]) / total
        return float(weights @ (np.logaddexp(0.0, found) - targets * found)) / total, gradient

    slope, height = minimize(loss, [scale, centre], jac=True, method="BFGS", options={"gtol": 1e-9}).x
    if slope <= 0:
        return None
    return Curve([centre], [float(height)], float(slope / scale))


def _isotonic(logits: Floats, labels: Floats, weights: Floats, rate: float) -> Curve:
    x, places = np.unique(logits, return_inverse=True)
    found: Floats = np.bincount(places, weights).astype(np.float64)
    x, y, total = _pooled(x, np.bincount(places, weights * labels) / found, found)
    # One more row with the mean label keeps each block's rate above 0 and below 1. Blocks that are
    # then out of order are pooled again.
    x, y, total = _pooled(x, (y * total + rate) / (total + 1), total)
    y = logit(y)
    y += OWN_SHARE * (x - y - np.average(x - y, weights=total))
    return Curve(x.tolist(), y.tolist(), 1.0)


def _pooled(x: Floats, y: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the mean x, the mean y and the weight of each block of the isotonic regression."""
    found = isotonic_regression(y, weights=weights)
    starts = found.blocks[:-1]
    return np.add.reduceat(x * weights, starts) / found.weights, found.x[starts], found.weights


class Curves:
    """The curves of one label: one for all rows, and curves for ids of a column."""

    def __init__(self, whole: Curve, by_id: dict[int, Curve]) -> None:
        self.whole, self.by_id = whole, dict(sorted(by_id.items()))
        curves = [whole, *self.by_id.values()]
        self._ids = np.array([*self.by_id], np.int64)
        ends = np.cumsum([len(curve.x) for curve in curves])
        self._first, self._last = np.append(0, ends[:-1]), ends - 1
        self._x, self._y = (np.concatenate([getattr(curve, axis) for curve in curves]) for axis in "xy")
        self._left = np.array([curve.slope for curve in curves])
        self._right = np.concatenate([[*np.diff(curve.y) / np.diff(curve.x), curve.slope] for curve in curves])
        self._num_halvings = int(np.max(self._last - self._first)).bit_length()

    def __call__(self, logits: Floats, ids: NDArray[np.int64] | None = None) -> Floats:
        """Return calibrated logits [n] of logits [n] and ids [n]. An id without a curve gets the one
        for all rows."""
        numbers = np.zeros(len(logits), np.int64)
        if ids is not None and len(self._ids):
            places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
            numbers = np.where(self._ids[places] == ids, places + 1, 0)
        first, low, high = self._first[numbers], self._first[numbers], self._last[numbers]
        for _ in range(self._num_halvings):  # the last point at or before each logit
            middle = (low + high + 1) // 2
            is_before = self._x[middle] <= logits
            low, high = np.where(is_before, middle, low), np.where(is_before, high, middle - 1)
        slopes = np.where(logits < self._x[first], self._left[numbers], self._right[low])
        return np.asarray(self._y[low] + slopes * (logits - self._x[low]))
