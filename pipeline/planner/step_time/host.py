"""Fit what whole steps take beyond their kernels: the trainer's own work, Python between operations, caches that are cold.

The rows `job` of a calibration are small trainings: what their kernels should take, and what a step took. Coefficients are
found by least squares of relative errors (kernels.fit_rates); factors on kernels are drawn towards 1, and no coefficient is
below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planner.step_time.kernels import fit_rates
from pipeline.planner.step_time.measurements import Measurement

FACTORS = ("products", "moves", "lookup", "update", "comms")  # microseconds that the kernels should take
COUNTS = ("constant", "operations", "samples", "features")
DRAWN_TO_ONE = 0.3


@dataclass(frozen=True)
class HostModel:
    """A step is the sum of amounts, each at its rate. error: mean of the relative errors' absolute values on its own rows."""

    rates: dict[str, float]
    error: float

    def step_us(self, amounts: dict[str, float]) -> float:
        return sum(rate * amounts[name] for name, rate in self.rates.items())

    def host_us(self, amounts: dict[str, float]) -> float:
        """The part that no kernel has."""
        return sum(self.rates[name] * amounts[name] for name in COUNTS)


PLAIN = HostModel({**dict.fromkeys(COUNTS, 0.0), **dict.fromkeys(FACTORS, 1.0)}, 0.0)


def fit_host(rows: Sequence[Measurement]) -> HostModel:
    """PLAIN where no job was measured."""
    if not rows:
        return PLAIN
    names = (*COUNTS, *FACTORS)
    times = np.array([row.us for row in rows])
    terms = np.array([[float(row.shape[name]) for name in names] for row in rows])
    drawn = np.zeros((len(FACTORS), len(names)))
    for index in range(len(FACTORS)):
        drawn[index, len(COUNTS) + index] = DRAWN_TO_ONE
    rates = fit_rates(terms, times, drawn, np.full(len(FACTORS), DRAWN_TO_ONE))
    error = float(np.abs(terms @ rates / times - 1).mean())
    return HostModel(dict(zip(names, map(float, rates), strict=True)), error)
