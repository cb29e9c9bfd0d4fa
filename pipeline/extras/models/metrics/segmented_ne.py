"""Compute the NE within segments: the log loss divided by that of predicting each segment's own label
rate (segmented_ne:country).

NE compares a model with one label rate for all rows, so a model that only knows the segment looks
good. Below 1, this metric shows what the model knows beyond the segment.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipeline.config.registry import register
from pipeline.data.quality import Floats, log_losses_of_scores
from pipeline.models.metrics.metric import GroupMetric


@register("metric", "segmented_ne")
class SegmentedNe(GroupMetric):
    def sums_of_groups(
        self, predictions: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]
    ) -> Floats:  # fmt: skip
        """Local: return the log loss, and the entropy of the label rates, of segments with both labels."""
        number_of = np.unique(groups, return_inverse=True)[1]
        sums = [weights, weights * labels, weights * log_losses_of_scores(predictions, labels)]
        weight, positives, losses = (np.bincount(number_of, each) for each in sums)
        mixed = (positives > 0) & (positives < weight)
        rate = positives[mixed] / weight[mixed]
        entropies = -weight[mixed] * (rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
        return np.array([losses[mixed].sum(), entropies.sum()])

    def value(self, sums: Floats) -> float:
        return float(sums[0] / sums[1]) if sums[1] else math.nan
