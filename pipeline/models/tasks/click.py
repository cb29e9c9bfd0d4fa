"""Predict click-through rates: cross-entropy of a logit per row, and NE, AUC and calibration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.models.tasks.click_metrics import Prediction, RunningMetrics, ScoreCollector
from pipeline.models.tasks.task import Measure
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext


@register("task", "click")
class ClickTask(nn.Module):
    """Compute binary cross-entropy of logits [batch, 1], weighted by the rows' weights."""

    no_export = ""

    def __init__(self, config: ModelConfig, tables: list[Table]) -> None:
        super().__init__()

    def forward(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Prediction]:
        logits = logit_a_row(logits, len(batch.labels))
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.sample_weights)
        return loss, Prediction(loss.detach(), logits.detach(), batch.labels, batch.sample_weights)

    def losses(self, prediction: Prediction) -> torch.Tensor:
        """Return the loss of each row [batch]."""
        return F.binary_cross_entropy_with_logits(
            prediction.logits, prediction.labels, weight=prediction.sample_weights, reduction="none"
        )

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        return RunningMetrics(context, batch_size, window_samples)

    def evaluation_measure(self, context: DistributedContext, batch_size: int) -> Measure:
        return ClickMeasure(context, batch_size)


def logit_a_row(output: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return one logit per row as [batch] float32. Raises ConfigError if the model returns another shape."""
    if not isinstance(output, torch.Tensor) or output.numel() != num_rows:
        given = list(output.shape) if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        raise ConfigError(
            f"the model returns {given} for {num_rows} rows; its forward must return one logit per row, [{num_rows}, 1]"
        )
    return output.reshape(-1).float()


class ClickMeasure:
    """Measure NE, log loss, calibration, label rate, AUC and AUPRC, and count the samples."""

    def __init__(self, context: DistributedContext, batch_size: int) -> None:
        self._context = context
        self._running, self._scores = RunningMetrics(context, batch_size), ScoreCollector()

    def update(self, prediction: Prediction) -> None:
        self._running.update(prediction)
        self._scores.update(prediction)

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        return {**self._running.compute(), **self._scores.compute(self._context)}
