"""A task in one file: clicks whose labels are smoothed, and its measures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.models.tasks.click import ClickMeasure, Prediction
from pipeline.models.tasks.click_metrics import RunningMetrics
from pipeline.models.tasks.task import Measure
from pipeline.runtime.process.distributed import DistributedContext

SMOOTHING = 0.02


@register("task", "smoothed_click")
class SmoothedClick(nn.Module):
    """Binary cross-entropy to labels of 0.01 and 0.99; the metrics are of the labels as they are."""

    no_export = ""

    def __init__(self, config: ModelConfig, tables: list[Table]) -> None:
        super().__init__()

    def forward(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Prediction]:
        prediction = Prediction(torch.zeros(()), logits.reshape(-1).float(), batch.labels, batch.sample_weights)
        loss = self.losses(prediction).mean()
        return loss, prediction._replace(loss=loss.detach(), logits=prediction.logits.detach())

    def losses(self, prediction: Prediction) -> torch.Tensor:
        labels = prediction.labels * (1 - SMOOTHING) + SMOOTHING / 2
        return F.binary_cross_entropy_with_logits(
            prediction.logits, labels, weight=prediction.sample_weights, reduction="none"
        )

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        return RunningMetrics(context, batch_size, window_samples)

    def evaluation_measure(self, context: DistributedContext, batch_size: int) -> Measure:
        return ClickMeasure(context, batch_size)
