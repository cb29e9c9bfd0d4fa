"""Estimate the value of a policy from the log of another policy. Only arrays.

w = pi(a | x) / p is the weight of a logged decision, r its reward, q(x, a) the model's prediction
and v(x) = sum over a of pi(a | x) q(x, a):

- IPS: mean of w r (Horvitz, Thompson 1952);
- SNIPS: sum of w r / sum of w (Swaminathan, Joachims 2015);
- doubly robust: mean of v + w (r - q) (Dudik et al. 2011);
- switch: the same without the correction of rows whose weight is above a limit (Wang et al. 2017).

IPS and doubly robust are unbiased if the propensities are right and the log had a chance to show
every action that the policy chooses. Each estimate is a ratio of two sums over units: decisions, or
groups of decisions that depend on each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_SAMPLES = 1000
MAX_UNITS = 10_000  # for the bootstrap; more units are added up in neighbouring blocks
SAMPLES_AT_ONCE = 50
# Intervals are unreliable with fewer effective decisions, or if one decision has more of all weight
# (benchmarks/off_policy.py measures intervals on both sides of these limits).
FEW, MAX_SHARE = 30.0, 0.05
ESTIMATORS = ("ips", "snips", "doubly_robust", "switch")


@dataclass(frozen=True)
class Decisions:
    """The decisions of a log [n], and what a policy with a model would have done in them.

    propensity: of the logged action, by the logging policy. chosen: by the policy. predicted: the
    model's prediction of the reward of the logged action. expected: v(x). unit: decisions with an
    equal number depend on each other. place: the position, None if the data have none. unknown:
    decisions whose action the model does not know. actions: candidates of a decision on average.
    """

    reward: Floats
    propensity: Floats
    chosen: Floats
    predicted: Floats
    expected: Floats
    unit: NDArray[np.int64]
    place: Floats | None = None
    unknown: int = 0
    actions: float = 0.0

    @property
    def weights(self) -> Floats:
        return self.chosen / self.propensity

    @property
    def doubly_robust(self) -> Floats:
        """Return the terms [n] whose mean is the doubly robust estimate."""
        return self.expected + self.weights * (self.reward - self.predicted)


class Estimate(NamedTuple):
    """A value with the bounds of its interval."""

    value: float
    low: float
    high: float
    error: float


def effective_size(weights: Floats) -> float:
    """Return Kish's effective sample size."""
    return float(weights.sum() ** 2 / max(np.square(weights).sum(), 1e-300))


def why_unreliable(weights: Floats) -> str:
    """Return why intervals with these weights are not reliable, "" if they are."""
    if (size := effective_size(weights)) < FEW:
        return f"the decisions are worth {size:,.1f} at equal weights, fewer than {FEW:.0f}"
    share = float(weights.max() / weights.sum())
    return f"one decision has {share:.0%} of all weight, more than {MAX_SHARE:.0%}" if share > MAX_SHARE else ""


def switch_limit(rows: Decisions) -> float:
    """Return the limit of weights with the least variance plus squared bias (Wang et al. 2017, section
    3.3). The bias is the policy's share of decisions above the limit, times the error of the model
    there, which is taken to be the mean reward at most."""
    weights, error = rows.weights, rows.reward.mean()
    limits = [*np.quantile(weights[weights > 0.0], np.linspace(0.5, 0.995, 25)), math.inf] if weights.any() else [0.0]

    def loss(limit: float) -> float:
        kept = np.where(weights <= limit, weights, 0.0)
        terms = rows.expected + kept * (rows.reward - rows.predicted)
        return float(terms.var() / len(terms) + (error * (weights - kept).mean()) ** 2)

    return min(limits, key=loss)


def estimates(
    rows: Decisions, confidence: float, max_weight: float | None = None, num_samples: int = NUM_SAMPLES, seed: int = 0
) -> dict[str, Estimate]:
    """Return the value of the policy by each estimator, and `logged`: the mean reward of the log."""
    weights, ones = rows.weights, np.ones(len(rows.reward))
    limit = switch_limit(rows) if max_weight is None else max_weight
    kept = np.where(weights <= limit, weights, 0.0)
    pairs = {
        "ips": (weights * rows.reward, ones),
        "snips": (weights * rows.reward, weights),
        "doubly_robust": (rows.doubly_robust, ones),
        "switch": (rows.expected + kept * (rows.reward - rows.predicted), ones),
        "logged": (rows.reward, ones),
        "mean_weight": (weights, ones),
    }
    found = intervals(list(pairs.values()), rows.unit, confidence, num_samples, seed)
    return dict(zip(pairs, found, strict=True))


def intervals(
    pairs: list[tuple[Floats, Floats]],
    units: NDArray[np.int64],
    confidence: float,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
) -> list[Estimate]:
    """Return sum(above) / sum(below) of each pair [n] with a two-sided interval.

    It is a symmetric bootstrap-t over units (Hall 1988): the quantile of the absolute t statistic of
    resamples replaces Student's. The t interval misses too often if few heavy weights decide,
    because the standard error is then small exactly when the estimate is.
    """
    sums = _by_unit([each for pair in pairs for each in pair], units)
    above, below = sums[:, 0::2], sums[:, 1::2]
    value, error = _ratios(
        above.sum(0), below.sum(0), np.square(above).sum(0), (above * below).sum(0), np.square(below).sum(0), len(sums)
    )
    moments = np.concatenate([above, below, np.square(above), above * below, np.square(below)], axis=1)
    random, share, statistics = np.random.default_rng(seed), np.full(len(sums), 1.0 / len(sums)), []
    for begin in range(0, num_samples, SAMPLES_AT_ONCE):
        counts = random.multinomial(len(sums), share, size=min(SAMPLES_AT_ONCE, num_samples - begin))
        above_sum, below_sum, *squares = np.split(counts @ moments, 5, axis=1)
        resampled, spread = _ratios(above_sum, below_sum, squares[0], squares[1], squares[2], len(sums))
        statistics.append(np.abs(resampled - value) / np.maximum(spread, 1e-3 * error + 1e-300))
    reach = np.nanquantile(np.concatenate(statistics), confidence, axis=0) * error
    return [Estimate(*map(float, each)) for each in zip(value, value - reach, value + reach, error, strict=True)]


def _ratios(
    above: Floats, below: Floats, above_2: Floats, product: Floats, below_2: Floats, count: int
) -> tuple[Floats, Floats]:
    """Return ratios of sums, and their standard errors by the delta method."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = above / below
        squares = np.maximum(above_2 - 2.0 * ratio * product + ratio**2 * below_2, 0.0)
        return ratio, np.sqrt(squares * count / max(count - 1, 1)) / np.abs(below)


def _by_unit(values: list[Floats], units: NDArray[np.int64]) -> Floats:
    """Return [units, values]: the sums of each unit, or of blocks of neighbouring units if there are many."""
    number_of = np.unique(units, return_inverse=True)[1]
    count = int(number_of.max()) + 1
    if count > MAX_UNITS:
        number_of, count = number_of * MAX_UNITS // count, MAX_UNITS
    return np.stack([np.bincount(number_of, each, minlength=count) for each in values], axis=1)
