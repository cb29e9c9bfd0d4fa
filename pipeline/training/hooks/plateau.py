"""Lower both learning rates if the model no longer improves on the validation split."""

from __future__ import annotations

from typing import Any

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.runtime.logs import get_logger
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState
from pipeline.training.hooks.early_stop import EarlyStop

logger = get_logger(__name__)


@register("hook", "plateau")
class ReduceOnPlateau(Hook):
    """Multiplies `state.lr_factor`.

    A checkpoint holds the factor and the count, so a resume is exact.
    """

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._config = job.schedule.plateau
        self._progress = EarlyStop(self._config, job.plateau_metric)

    def on_evaluation_end(self, state: TrainingState, metrics: dict[str, float]) -> None:
        if not self._config.patience or not state.is_evaluation_due(self.job.trainer):
            return
        self._progress.update(metrics)
        if self._progress.is_exhausted:
            self._progress.num_worse = 0
            state.lr_factor *= self._config.factor
            logger.info(
                "step %d  no better %s: learning rates x %g", state.step, self.job.plateau_metric, state.lr_factor
            )

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        if not self._config.patience:
            return {}
        best, num_worse = self._progress.best, self._progress.num_worse
        return {"plateau": {"factor": state.lr_factor, "best": best, "num_worse": num_worse}}

    def on_restore(self, state: TrainingState, manifest: dict[str, Any]) -> None:
        earlier = dict(manifest.get("plateau", {}))
        state.lr_factor = earlier.pop("factor", 1.0)
        self._progress = EarlyStop(self._config, self.job.plateau_metric, **earlier)
