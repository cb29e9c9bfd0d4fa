"""What a metric is: a number of an evaluation, added to those of the model's task by name.

    @register("metric", "accuracy")
    class Accuracy(Metric):
        higher_is_better = True

        def sums(self, predictions, labels, weights):
            return np.array([weights.sum(), weights[(predictions > 0.5) == (labels > 0.5)].sum()])

        def value(self, sums):
            return sums[1] / sums[0]

`trainer.metrics=[accuracy]` measures it at each evaluation of a training, and early stopping, plateaus and best steps may go by
it. `python -m pipeline evaluate run=... metrics=[accuracy]` measures it once.
"""

from __future__ import annotations

from typing import ClassVar

from pipeline.data.quality import Floats


class Metric:
    """A number that follows from sums over rows. So it is the same in any order of rows and over any number of ranks."""

    higher_is_better: ClassVar[bool] = False

    def sums(self, predictions: Floats, labels: Floats, weights: Floats) -> Floats:
        """Local. Of the rows of a batch, [n] each, to [k]; those of all batches and ranks are added up.

        predictions: probabilities, the sigmoid of the logits. labels: 0 or 1. weights: above 0; other rows are left out.
        A batch may have no row.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sums")

    def value(self, sums: Floats) -> float:
        """Of the sums over all rows, [k]; NaN where they leave it undefined."""
        raise NotImplementedError(f"{type(self).__name__} has no value")
