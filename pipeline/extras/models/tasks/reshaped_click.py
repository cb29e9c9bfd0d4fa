"""Train one binary label by a changed loss (trainer.loss): smoothed labels, weighted positives, focal loss, ranking within
groups, position bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
    """Compute the loss of LossConfig. The metrics are those of ClickTask, with the position bias."""

    def __init__(self, config: ModelConfig, tables: list[Table], loss: LossConfig, num_streams: int = 1) -> None:
        """num_streams: of all ranks; a batch has equally many rows of each."""
        super().__init__(config, tables)
        self._ranking = RANKINGS[loss.ranking] if loss.ranking else None
        self._ranking_weight, self._num_streams = loss.ranking_weight, num_streams
        self._smoothing, self._gamma, alpha = loss.label_smoothing, loss.focal_gamma, loss.focal_alpha
        self._positive, self._negative = (loss.pos_weight, 1.0) if alpha is None else (alpha, 1.0 - alpha)
        self._aside = {name: column for column, name in enumerate(loss.columns)}
        self._position = None if loss.position is None else self._aside[loss.position]
        self.position_bias = PositionBias(loss.num_positions, loss.reference_position) if loss.position else None

    def forward(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Any]:
        logits = logit_a_row(logits, len(batch.labels))
        if self.position_bias is not None:
            assert batch.aside is not None, "the job's readers give LossConfig.columns"
            logits = logits + self.position_bias(batch.aside[:, self._position])
        losses = self._row_losses(logits, batch.labels, batch.sample_weights)
        if self.training and self._ranking is not None:
            if batch.groups is None:
                raise ConfigError(
                    "trainer.loss.ranking: these batches have no groups, as those of a stream; leave it out"
                )
            num_ranks = dist.get_world_size() if dist.is_initialized() else 1
            ranked = self._ranking(ListRows.of(logits, batch, self._num_streams // num_ranks)).reshape(-1)
            losses = torch.lerp(losses, ranked, self._ranking_weight)
        loss = losses.mean()
        return loss, RowPrediction(loss.detach(), logits.detach(), batch.labels, batch.sample_weights, losses.detach())

    def losses(self, prediction: RowPrediction) -> torch.Tensor:  # type: ignore[override]
        """Return the loss of each row [batch]."""
        return prediction.losses

    def _row_losses(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        smooth = labels * (1.0 - self._smoothing) + self._smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, smooth, weight=weights, reduction="none")
        losses = losses * (self._negative + (self._positive - self._negative) * labels)
        # (1 - p(y)) ** gamma by its logarithm: a power's gradient is NaN at 0 if gamma is below 1
        return losses * torch.exp(self._gamma * F.logsigmoid((1.0 - 2.0 * labels) * logits))
