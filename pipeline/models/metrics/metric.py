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

from pipeline.data.quality import Floats


class Metric:
    """Compute a number from sums over rows. So the order of the rows and the number of ranks do not change it."""

    higher_is_better: ClassVar[bool] = False

    def sums(self, predictions: Floats, labels: Floats, weights: Floats) -> Floats:
        """Local: return the sums [k] over the rows [n] of a batch, which may have none.

        predictions: probabilities. labels: 0 or 1. weights: above 0; other rows are left out.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sums")

    def value(self, sums: Floats) -> float:
        """Return the metric from the sums [k] over all rows; NaN if the sums leave it undefined."""
        raise NotImplementedError(f"{type(self).__name__} has no value")
