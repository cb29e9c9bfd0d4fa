"""A metric in one file: the share of rows that fall on the right side of a probability of 0.3."""

from __future__ import annotations

import math

import numpy as np

from pipeline.config.registry import register
from pipeline.data.quality import Floats
from pipeline.models.metrics.metric import Metric


@register("metric", "accuracy_at_30")
class AccuracyAt30(Metric):
    higher_is_better = True

    def sums(self, predictions: Floats, labels: Floats, weights: Floats) -> Floats:
        return np.array([weights.sum(), weights[(predictions >= 0.3) == (labels == 1.0)].sum()])

    def value(self, sums: Floats) -> float:
        return float(sums[1] / sums[0]) if sums[0] else math.nan
