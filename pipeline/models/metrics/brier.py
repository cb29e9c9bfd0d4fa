"""Compute the Brier score: the mean squared difference between a prediction and its label (Brier
1950); 0 is best.
"""

from __future__ import annotations

import math

import numpy as np

from pipeline.config.registry import register
from pipeline.data.quality import Floats
from pipeline.models.metrics.metric import Metric


@register("metric", "brier")
class Brier(Metric):
    def sums(self, predictions: Floats, labels: Floats, weights: Floats) -> Floats:
        return np.array([weights.sum(), (weights * (predictions - labels) ** 2).sum()])

    def value(self, sums: Floats) -> float:
        return float(sums[1] / sums[0]) if sums[0] else math.nan
