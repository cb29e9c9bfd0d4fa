"""Define the interface of a metric: a number of an evaluation, added by name to the metrics of the
model's task.

    @register("metric", "accuracy")
    class Accuracy(Metric):
        higher_is_better = True

        def sums(self, predictions, labels, weights):
            return np.array([weights.sum(), weights[(predictions > 0.5) == (labels > 0.5)].sum()])

        def value(self, sums):
            return sums[1] / sums[0]

`trainer.metrics=[accuracy]` measures it at each evaluation of a training. Early stopping, plateaus
and best steps may use it. `python -m pipeline evaluate run=... metrics=[accuracy]` measures it
once.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.data.quality import Floats


class Metric:
    """Compute a number from sums over rows. So the order of the rows and the number of ranks do not change it."""

    higher_is_better: ClassVar[bool] = False
    kinds: ClassVar[tuple[str, ...]] = ("binary",)  # of labels: binary, or number (regression and ordinal)

    def sums(self, predictions: Floats, labels: Floats, weights: Floats) -> Floats:
        """Local: return the sums [k] over the rows [n] of a batch, which may have none.

        predictions: probabilities. labels: 0 or 1. weights: above 0; other rows are left out.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sums")

    def value(self, sums: Floats) -> float:
        """Return the metric from the sums [k] over all rows; NaN if the sums leave it undefined."""
        raise NotImplementedError(f"{type(self).__name__} has no value")


class GroupMetric(Metric):
    """Compute a number from sums over groups of rows, as the mean of the groups' AUCs. The groups are
    those of data.group_column; for the name gauc:user, the first ids of the feature `user`.

    of_all_rows: without a feature all rows are one group, for metrics of pairs of rows.
    """

    of_all_rows: ClassVar[bool] = False

    def sums_of_groups(
        self, predictions: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]
    ) -> Floats:  # fmt: skip
        """Local: return the sums [k] over groups, all of whose rows [n] are given; n may be 0.

        groups: the number of each row's group; 0 is a missing or unknown value.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sums_of_groups")
