"""Fit a kernel's time as a sum of amounts of work, each at a rate that is not negative."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.optimize import nnls

from pipeline.planner.step_time.correction import Correction, Floats

Place: TypeAlias = Callable[[Mapping[str, float]], tuple[float, ...]]
ROUNDS, LEAST_FITTED = 4, 0.2  # of fit_rates
LEAST_US = 0.3


@dataclass(frozen=True)
class Rates:
    """A sum of amounts, each at its rate, and a correction of its logarithm that amounts alike share."""

    rates: dict[str, float]
    error: float  # mean of the relative errors' absolute values, of the sum alone
    correction: Correction
    place: Place  # of amounts

    @staticmethod
    def fit(rows: Sequence[Mapping[str, float]], microseconds: Sequence[float], place: Place) -> Rates:
        names = ("call", *dict.fromkeys(name for row in rows for name in row))
        times = np.array(microseconds)
        terms = np.array([[1.0, *(row.get(name, 0.0) for name in names[1:])] for row in rows])
        solved = fit_rates(terms, times)
        fitted = np.maximum(terms @ solved, 1e-3)
        correction = Correction.fit([place(row) for row in rows], times, fitted)
        rates = dict(zip(names, map(float, solved), strict=True))
        return Rates(rates, float(np.abs(fitted / times - 1).mean()), correction, place)

    def us(self, amounts: Mapping[str, float]) -> float:
        base = sum(rate * amounts.get(name, 0.0) for name, rate in self.rates.items()) + self.rates["call"]
        return max(base, LEAST_US) * self.correction.factor(self.place(amounts))


def fit_rates(terms: Floats, times: Floats, drawn: Floats | None = None, wanted: Floats | None = None) -> Floats:
    """Rates [terms], none below zero, of a sum [times, terms] that is as often too long as too short, in proportion.

    Least squares of relative errors would rather be too short: each round weighs by what the round before came to. Further
    rows `drawn`, of which `wanted` is expected, count as they are.
    """
    weights = np.ones(len(times))
    solved = np.zeros(terms.shape[1])
    more, more_wanted = (
        (np.empty((0, terms.shape[1])), np.empty(0)) if drawn is None or wanted is None else (drawn, wanted)
    )
    for _ in range(ROUNDS):
        matrix = np.vstack([terms / times[:, None] * weights[:, None], more])
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
        found, _ = nnls(matrix / scale, np.concatenate([weights, more_wanted]))
        solved = found / scale
        weights = np.sqrt(1 / np.maximum(terms @ solved / times, LEAST_FITTED))
    return solved
