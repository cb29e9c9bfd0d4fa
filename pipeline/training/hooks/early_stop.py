"""Turn one evaluation after another into the decision that training has stopped improving."""

from __future__ import annotations

import math

from pipeline.checkpoint.retention import is_higher_better
from pipeline.config.training import EarlyStopConfig


class EarlyStop:
    """Counts evaluations in a row without an improvement; all ranks see the same metrics, so all agree."""

    def __init__(self, config: EarlyStopConfig, best: float | None = None, num_worse: int = 0) -> None:
        self._config = config
        self.best, self.num_worse = best, num_worse

    @property
    def is_exhausted(self) -> bool:
        return 0 < self._config.patience <= self.num_worse

    def update(self, metrics: dict[str, float]) -> None:
        metric = self._config.metric or "ne"
        value = metrics[metric]
        if math.isnan(value):  # a split of one class has no AUC: it says nothing
            return
        value = -value if is_higher_better(metric) else value
        if self.best is None or value < self.best - self._config.min_delta:
            self.best, self.num_worse = value, 0
        else:
            self.num_worse += 1
