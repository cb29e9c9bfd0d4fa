"""Compute the NE after one number was added to all logits, so that the mean prediction is the label
rate. NE minus this metric is what a model loses by its calibration on average.

It is the least NE that TorchRec's RecalibratedNE has for any coefficient c, where log(c) is the
number added. One pass is sufficient, because logits are counted in narrow buckets with their mean
and variance; the error is of the third order in the width.
"""

from __future__ import annotations

import math

import numpy as np

from pipeline.config.registry import register
from pipeline.data.quality import Floats, binary_entropy, probabilities
from pipeline.models.metrics.metric import Metric

BUCKETS_PER_UNIT, HIGHEST = 32, 20  # of logits; logits beyond are taken for the highest
NUM_BUCKETS = 2 * HIGHEST * BUCKETS_PER_UNIT
STEPS = 60


@register("metric", "recalibrated_ne")
class RecalibratedNe(Metric):
    def sums(self, predictions: Floats, labels: Floats, weights: Floats) -> Floats:
        """Local: return sums for each bucket of logits: weights, and times the logit and its square. The
        last two numbers are the weights of positives, and times their logits.
        """
        with np.errstate(divide="ignore"):
            logits = np.clip(np.log(predictions) - np.log1p(-predictions), -HIGHEST, HIGHEST)
        bucket = np.minimum(((logits + HIGHEST) * BUCKETS_PER_UNIT).astype(np.int64), NUM_BUCKETS - 1)
        columns = (weights, weights * logits, weights * logits**2)
        sums = [np.bincount(bucket, column, NUM_BUCKETS) for column in columns]
        positives = weights * labels
        return np.concatenate([*sums, [positives.sum(), (positives * logits).sum()]])

    def value(self, sums: Floats) -> float:
        weight, firsts, seconds = sums[:-2].reshape(3, NUM_BUCKETS)
        positives, positive_logits = sums[-2:]
        total = weight.sum()
        if not 0.0 < positives < total:
            return math.nan
        used = weight > 0
        weight, mean = weight[used], firsts[used] / weight[used]
        variance = np.maximum(seconds[used] / weight - mean**2, 0.0)

        def curvature(shift: float) -> Floats:
            """Return half of the second derivative of each bucket's loss, times the variance of its logits."""
            scores = probabilities(mean + shift)
            found: Floats = scores * (1 - scores) * variance / 2
            return found

        low, high = -2.0 * HIGHEST, 2.0 * HIGHEST
        for _ in range(STEPS):  # the loss is convex in the shift, and its slope is predictions minus labels
            shift = (low + high) / 2
            scores = probabilities(mean + shift)
            slope = (weight * (scores + (1 - 2 * scores) * curvature(shift))).sum() - positives
            low, high = (shift, high) if slope < 0 else (low, shift)
        losses = (weight * (np.logaddexp(0.0, mean + shift) + curvature(shift))).sum()
        return float((losses - positive_logits - positives * shift) / total / binary_entropy(positives / total))
