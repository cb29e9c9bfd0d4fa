"""Fit what whole steps take beyond their kernels: the trainer's own work, Python between operations, caches that are cold.

The rows `job` of a calibration are small trainings: what their kernels should take, and what a step took. Coefficients are
found by least squares of relative errors (rates.fit_rates), first of all setups together with factors on kernels drawn towards 1, then
of each setup drawn towards those; no coefficient is below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planner.step_time.measurements import Measurement, Measurements
from pipeline.planner.step_time.rates import fit_rates

FACTORS = ("products", "moves", "lookup", "update", "comms")  # microseconds that the kernels should take
COUNTS = ("constant", "operations", "multiplied", "handed", "features", "shardings")
DRAWN = 0.2  # a rate twice as high as expected counts as a job that is so far off


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


def host_model(measurements: Measurements, setup: str) -> HostModel:
    """Of the jobs of a setup, drawn towards what those of all setups say together; PLAIN where no job was measured."""
    everything = [row for row in measurements.rows if row.kind == "job"]
    return fit_host(measurements.of("job", setup), fit_host(everything)) if everything else PLAIN


def fit_host(rows: Sequence[Measurement], drawn_to: HostModel = PLAIN) -> HostModel:
    """Rates are drawn towards those of another model, but for what it has none of; that model where no job was measured."""
    if not rows:
        return drawn_to
    names = (*COUNTS, *FACTORS)
    times = np.array([row.us for row in rows])
    terms = np.array([[float(row.shape.get(name, 0.0)) for name in names] for row in rows])
    known = [index for index, name in enumerate(names) if drawn_to.rates[name] > 0]
    drawn = np.zeros((len(known), len(names)))
    for row, index in enumerate(known):
        drawn[row, index] = DRAWN / drawn_to.rates[names[index]]
    rates = fit_rates(terms, times, drawn, np.full(len(known), DRAWN))
    error = float(np.abs(terms @ rates / times - 1).mean())
    return HostModel(dict(zip(names, map(float, rates), strict=True)), error)
