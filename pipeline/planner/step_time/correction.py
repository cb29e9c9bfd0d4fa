"""Correct what a formula of a kernel's time comes to, by how far it was off for kernels alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST = 1.2  # natural logarithm
NOISE = 0.2  # beside the formula's error, of 1


@dataclass(frozen=True)
class Correction:
    """Of a time's logarithm: a Gaussian process (kriging) over places, whose distances are in units of how far likeness reaches."""

    places: Floats  # [measurements, axes]
    weights: Floats  # of their likeness

    @staticmethod
    def fit(places: Sequence[Sequence[float]], times: Floats, formula: Floats) -> Correction:
        """`formula`: what it comes to at the places, in the unit of the times."""
        at = np.array(places, dtype=np.float64)
        likeness = _likeness(at, at) + NOISE**2 * np.eye(len(at))
        return Correction(at, np.asarray(np.linalg.solve(likeness, np.log(times / formula)), dtype=np.float64))

    def factor(self, place: Sequence[float]) -> float:
        found = float((_likeness(np.array([place], dtype=np.float64), self.places) @ self.weights)[0])
        return math.exp(max(-MOST, min(MOST, found)))


def _likeness(places: Floats, others: Floats) -> Floats:
    """[places, others] Matern 3/2 of their distances."""
    squares = (places**2).sum(1)[:, None] + (others**2).sum(1)[None] - 2 * places @ others.T
    distances = math.sqrt(3) * np.sqrt(np.maximum(squares, 0.0))
    likeness: Floats = (1 + distances) * np.exp(-distances)
    return likeness
