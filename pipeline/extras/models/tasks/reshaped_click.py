"""Train one binary label by a changed loss: smoothed labels, weighted positives, focal loss, ranking within groups (trainer.loss)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.config.training import LossConfig
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.extras.models.tasks.ranking import RANKINGS, ListRows
from pipeline.models.tasks.click import ClickTask, logit_a_row
from pipeline.models.tasks.click_metrics import Prediction
from pipeline.runtime.errors import ConfigError


@register("task", "reshaped_click")
class ReshapedClickTask(ClickTask):
    """Compute the loss of LossConfig. The metrics are those of ClickTask."""

    def __init__(self, config: ModelConfig, tables: list[Table], loss: LossConfig, num_streams: int = 1) -> None:
        super().__init__(config, tables)
        self._ranking = RANKINGS[loss.ranking] if loss.ranking else None
        self._ranking_weight, self._num_streams = loss.ranking_weight, num_streams
        self._smoothing, self._gamma, alpha = loss.label_smoothing, loss.focal_gamma, loss.focal_alpha
        self._positive, self._negative = (loss.pos_weight, 1.0) if alpha is None else (alpha, 1.0 - alpha)

    def forward(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Prediction]:
        logits = logit_a_row(logits, len(batch.labels))
        losses = self._row_losses(logits, batch.labels, batch.sample_weights)
        if self.training and self._ranking is not None:
            if batch.groups is None:
                raise ConfigError(
                    "trainer.loss.ranking: these batches have no groups, as those of a stream; leave it out"
                )
            lists = ListRows.of(
                logits, batch, self._num_streams // (dist.get_world_size() if dist.is_initialized() else 1)
            )
            losses = torch.lerp(losses, self._ranking(lists).reshape(-1), self._ranking_weight)
        loss = losses.mean()
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
