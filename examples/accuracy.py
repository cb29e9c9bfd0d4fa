"""A metric of your own in one file: the share of rows on the right side of a probability of 0.5.

python -m pipeline train data=quickstart plugins=[examples.accuracy] trainer.metrics=[accuracy] run_dir=runs/accuracy
python -m pipeline evaluate run=runs/accuracy plugins=[examples.accuracy]
"""

import numpy as np

from pipeline.config.registry import register
from pipeline.models.metrics.metric import Metric


@register("metric", "accuracy")
class Accuracy(Metric):
    higher_is_better = True

    def sums(self, predictions, labels, weights):  # [rows] each, of a batch -> [k]
        return np.array([weights.sum(), weights[(predictions >= 0.5) == (labels == 1.0)].sum()])

    def value(self, sums):  # of all batches and ranks
        return sums[1] / sums[0]
