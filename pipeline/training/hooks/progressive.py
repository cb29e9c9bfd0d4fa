"""Measure NE on the rows since the last save, each scored before it was trained on (progressive
validation).

The forward of a training step already gives this score, so it costs no extra forward. The manifest
of the saved step records the NE, and publishing compares it with earlier values.
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
    """Measures the main label if it is binary.

    Does nothing unless deltas are published or differences are saved.
    """

    def __init__(self, job: TrainJob, parts: TrainingParts) -> None:
        super().__init__(job, parts)
        self._wanted = job.publishing.when is not None or job.checkpoint.differential
        # sums of loss, labels and weights
        self._sums = torch.zeros(3, dtype=torch.float64, device=parts.context.device)
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
        return next(iter(clicks(prediction).values()))

    def saved_values(self, state: TrainingState) -> dict[str, Any]:
        """Return the NE since the last save for the manifest. Collective."""
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
    """Return NE, None if there are no rows or all labels are equal."""
    rate = labels / weights if weights else 0.0
    if not 0.0 < rate < 1.0:
        return None
    return loss / (-weights * (rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))
