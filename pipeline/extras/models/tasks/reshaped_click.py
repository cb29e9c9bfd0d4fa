"""Train one binary label by a changed loss: smoothed labels, weighted positives, focal loss (trainer.loss)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.config.training import LossConfig
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.models.tasks.click import ClickTask, logit_a_row
from pipeline.models.tasks.click_metrics import Prediction


@register("task", "reshaped_click")
class ReshapedClickTask(ClickTask):
    """Compute the loss of LossConfig. The metrics are those of ClickTask."""

    def __init__(self, config: ModelConfig, tables: list[Table], loss: LossConfig) -> None:
        super().__init__(config, tables)
        self._smoothing, self._gamma, alpha = loss.label_smoothing, loss.focal_gamma, loss.focal_alpha
        self._positive, self._negative = (loss.pos_weight, 1.0) if alpha is None else (alpha, 1.0 - alpha)

    def forward(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Prediction]:
        logits = logit_a_row(logits, len(batch.labels))
        loss = self._row_losses(logits, batch.labels, batch.sample_weights).mean()
        return loss, Prediction(loss.detach(), logits.detach(), batch.labels, batch.sample_weights)

    def losses(self, prediction: Prediction) -> torch.Tensor:
        """Return the loss of each row [batch]."""
        return self._row_losses(prediction.logits, prediction.labels, prediction.sample_weights)

    def _row_losses(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        smooth = labels * (1.0 - self._smoothing) + self._smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, smooth, weight=weights, reduction="none")
        losses = losses * (self._negative + (self._positive - self._negative) * labels)
        # (1 - p(y)) ** gamma by its logarithm: a power's gradient is NaN at 0 if gamma is below 1
        return losses * torch.exp(self._gamma * F.logsigmoid((1.0 - 2.0 * labels) * logits))
