"""Measure NE on the rows since the last save, each scored before it was trained on (progressive validation).

A training step's own forward is such a score, so it costs no forward of its own. The number goes into the manifest of the
step that is saved, where publishers hold it against those before.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import register
from pipeline.models.tasks.click_metrics import Prediction
from pipeline.training.hooks.base import Hook, TrainingParts, TrainingState


@register("hook", "progressive")
class ProgressiveValidation(Hook):
    """Of the main label, where it is binary; does nothing unless deltas are published, or differences saved."""

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._wanted = job.publishing.when is not None or job.checkpoint.differential
        self._sums = torch.zeros(3, dtype=torch.float64, device=parts.context.device)  # loss, labels, weights
        self._last: dict[str, float] = {}

    def on_batch_end(self, state: TrainingState, prediction: Any) -> None:
        click = self._click(prediction) if self._wanted and prediction is not None else None
        if click is None:
            return
        weights = click.sample_weights
        loss = F.binary_cross_entropy_with_logits(click.logits, click.labels, weight=weights, reduction="sum")
        self._sums += torch.stack([loss, (click.labels * weights).sum(), weights.sum()]).double()

    def _click(self, prediction: Any) -> Prediction | None:
        if isinstance(prediction, Prediction):
            return prediction
        task = getattr(self.parts.task, "task", None)
        clicks = getattr(task, "clicks", None)
        if clicks is None or task.targets[0].kind != "binary":  # type: ignore[union-attr]
            return None
        return next(iter(clicks(prediction).values()))  # type: ignore[no-any-return]

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        """Collective."""
        if not self._wanted:
            return {}
        sums = self._sums.clone()
        if self.parts.context.world_size > 1:
            dist.all_reduce(sums)
        self._sums.zero_()
        ne = normalized_entropy(*sums.tolist())
        self._last = {} if ne is None else {"ne": ne, "weight": float(sums[2])}
        return {"progressive": self._last}

    def log_values(self, state: TrainingState) -> dict[str, float]:
        return {"progressive_ne": self._last["ne"]} if self._last else {}

    def on_rollback(self, state: TrainingState) -> None:
        self._sums.zero_()


def normalized_entropy(loss: float, labels: float, weights: float) -> float | None:
    """None where there are no rows, or of one label alone."""
    rate = labels / weights if weights else 0.0
    if not 0.0 < rate < 1.0:
        return None
    return loss / (-weights * (rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))
