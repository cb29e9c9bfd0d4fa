"""Compute the expected calibration error: the distance of predictions from the label rate, by
buckets of predictions; 0 is best.

The overall calibration can be 1 although low predictions are too low and high predictions are too
high. This metric shows such errors (Naeini, Cooper and Hauskrecht 2015, Obtaining Well Calibrated
Probabilities Using Bayesian Binning, equation 3).
"""

from __future__ import annotations

import math

import numpy as np

from pipeline.config.registry import register
from pipeline.data.quality import Floats
from pipeline.models.metrics.metric import Metric

NUM_BUCKETS = 100  # of equal width


@register("metric", "ece")
class ExpectedCalibrationError(Metric):
    def sums(self, predictions: Floats, labels: Floats, weights: Floats) -> Floats:
        """Local: return the weight of all rows, then for each bucket the sum of predictions minus labels."""
        buckets = np.minimum((predictions * NUM_BUCKETS).astype(np.int64), NUM_BUCKETS - 1)
        excess = np.bincount(buckets, weights * (predictions - labels), minlength=NUM_BUCKETS)
        return np.concatenate([[weights.sum()], excess])

    def value(self, sums: Floats) -> float:
        return float(np.abs(sums[1:]).sum() / sums[0]) if sums[0] else math.nan
