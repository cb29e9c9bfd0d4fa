"""Stop a training run that no longer improves on the validation split."""

from __future__ import annotations

import math
from typing import Any

from pipeline.checkpoint.retention import is_higher_better
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.config.training import EarlyStopConfig, PlateauConfig
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState


class EarlyStop:
    """Counts consecutive evaluations without an improvement. All ranks see the same metrics and
    decide the same.

    `best` is negated if a higher metric is better.
    """

    def __init__(
        self, config: EarlyStopConfig | PlateauConfig, metric: str = "ne", best: float | None = None, num_worse: int = 0
    ) -> None:
        self._config, self._metric = config, metric
        self.best, self.num_worse = best, num_worse

    @property
    def is_exhausted(self) -> bool:
        return 0 < self._config.patience <= self.num_worse

    def update(self, metrics: dict[str, float]) -> None:
        value = metrics[self._metric]
        if math.isnan(value):  # the AUC of a split with one class is undefined and not counted
            return
        value = -value if is_higher_better(self._metric) else value
        if self.best is None or value < self.best - self._config.min_delta:
            self.best, self.num_worse = value, 0
        else:
            self.num_worse += 1


@register("hook", "early_stop")
class StopEarly(Hook):
    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._progress = EarlyStop(job.trainer.early_stop, job.early_stop_metric)

    def on_evaluation_end(self, state: TrainingState, metrics: dict[str, float]) -> None:
        if state.is_evaluation_due(self.job.trainer):
            self._progress.update(metrics)
            state.stopped_early = self._progress.is_exhausted

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        return {"early_stop": {"best": self._progress.best, "num_worse": self._progress.num_worse}}

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        earlier = manifest.get("early_stop", {})
        self._progress = EarlyStop(self.job.trainer.early_stop, self.job.early_stop_metric, **earlier)
        state.stopped_early = self._progress.is_exhausted
