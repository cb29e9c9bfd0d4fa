"""Compute GAUC within the values of a feature (gauc:user_id), or within data.group_column (gauc)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.config.registry import register
from pipeline.data.quality import Floats
from pipeline.models.metrics.groups import group_sums, metrics_of
from pipeline.models.metrics.metric import GroupMetric


@register("metric", "gauc")
class GroupedAuc(GroupMetric):
    higher_is_better = True

    def sums_of_groups(
        self, predictions: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]
    ) -> Floats:  # fmt: skip
        known = groups != 0
        return group_sums(groups[known], predictions[known], labels[known], [], weights[known])

    def value(self, sums: Floats) -> float:
        return metrics_of(sums, [])["gauc"]
