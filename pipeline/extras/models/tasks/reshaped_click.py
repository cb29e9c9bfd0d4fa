"""Train one binary label by a changed loss (trainer.loss): smoothed labels, weighted positives, focal loss, ranking within
groups, position bias, distillation, delayed feedback."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.config.training import LossConfig
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.extras.models.tasks.ranking import RANKINGS, ListRows
from pipeline.models.tasks.click import ClickTask, logit_a_row
from pipeline.runtime.errors import ConfigError


class RowPrediction(NamedTuple):
    """A click_metrics.Prediction with the loss of each row [batch]."""

    loss: torch.Tensor  # scalar
    logits: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor
    losses: torch.Tensor


class PositionBias(nn.Module):
    """Give each place the number that is added to its logits; 0 for the place that scores are for."""

    def __init__(self, num_positions: int, reference: int) -> None:
        super().__init__()
        self._reference = reference
        self.places = nn.Parameter(torch.zeros(num_positions))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        bias = self.places - self.places[self._reference]
        return bias[positions.long().clamp(0, len(self.places) - 1)]


@register("task", "reshaped_click")
class ReshapedClickTask(ClickTask):
    """Compute the loss of LossConfig. ClickTask's metrics are measured with the position bias."""

    def __init__(self, config: ModelConfig, tables: list[Table], loss: LossConfig, rows_per_stream: int = 1) -> None:
        super().__init__(config, tables)
        self._ranking = RANKINGS[loss.ranking] if loss.ranking else None
        self._ranking_weight, self._rows_per_stream = loss.ranking_weight, rows_per_stream
        self._smoothing, self._gamma, alpha = loss.label_smoothing, loss.focal_gamma, loss.focal_alpha
        self._positive, self._negative = (loss.pos_weight, 1.0) if alpha is None else (alpha, 1.0 - alpha)
        self._columns, self._position = loss.columns, loss.position
        self._teacher, self._teacher_weight = loss.teacher, loss.teacher_weight
        self._fake_negatives = loss.fake_negatives
        self.position_bias = PositionBias(loss.num_positions, loss.reference_position) if loss.position else None

    def forward(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Any]:
        logits = logit_a_row(logits, len(batch.labels))
        if self._position is not None and self.position_bias is not None:
            logits = logits + self.position_bias(self._column(batch, self._position))
        losses = self._row_losses(logits, batch)
        if self.training and self._ranking is not None:
            if batch.groups is None:
                raise ConfigError("trainer.loss.ranking: a stream has no groups of rows; leave the key out")
            ranked = self._ranking(ListRows.of(logits, batch, self._rows_per_stream)).reshape(-1)
            losses = torch.lerp(losses, ranked, self._ranking_weight)
        loss = losses.mean()
        return loss, RowPrediction(loss.detach(), logits.detach(), batch.labels, batch.sample_weights, losses.detach())

    def losses(self, prediction: RowPrediction) -> torch.Tensor:  # type: ignore[override]
        """Return the loss of each row [batch]."""
        return prediction.losses

    def _column(self, batch: Batch, name: str) -> torch.Tensor:
        assert batch.aside is not None, "the job's readers give LossConfig.columns"
        return batch.aside[:, self._columns.index(name)]

    def _row_losses(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        labels, weights = batch.labels, batch.sample_weights
        targets = labels * (1.0 - self._smoothing) + self._smoothing / 2
        if self.training and self._teacher is not None:
            teacher = self._column(batch, self._teacher)
            teacher = teacher.masked_fill((teacher < 0.0) | (teacher > 1.0), float("nan"))
            targets = torch.lerp(targets, teacher, self._teacher_weight)
        losses = F.binary_cross_entropy_with_logits(logits, targets, weight=weights, reduction="none")
        losses = losses * (self._negative + (self._positive - self._negative) * labels)
        if self.training and self._fake_negatives:
            chance = torch.sigmoid(logits.detach())
            losses = losses * (1.0 + chance) * (1.0 - chance * (1.0 - labels))
        # (1 - p(y)) ** gamma by its logarithm: a power's gradient is NaN at 0 if gamma is below 1
        return losses * torch.exp(self._gamma * F.logsigmoid((1.0 - 2.0 * labels) * logits))
