"""Warn at a log line if the training NE shows that a learning rate is too high."""

from __future__ import annotations

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.extras.diagnose.rules import DIVERGED_NE
from pipeline.runtime.logs import get_logger
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState

logger = get_logger("pipeline.training")


@register("hook", "diverging")
class Diverging(Hook):
    """Warns once. Every label's NE counts."""

    runs_after = "throughput"

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._has_warned = False

    def on_step_end(self, state: TrainingState) -> None:
        values = [value for name, value in state.logged.items() if name.rpartition("/")[2] == "ne"]
        worst = max((value for value in values if value == value), default=0.0)
        if worst > DIVERGED_NE and not self._has_warned and self.parts.context.is_main:
            self._has_warned = True
            rates = self.job.optimizer
            logger.warning(
                "step %d: training NE %.4g is above %g, and predicting the label rate for every row gives 1: the learning rate is too "
                "high. Stop, and start again with optimizer.sparse.lr=%g optimizer.dense.lr=%g",
                state.step, worst, DIVERGED_NE, rates.sparse.lr / 10, rates.dense.lr / 10,
            )  # fmt: skip
