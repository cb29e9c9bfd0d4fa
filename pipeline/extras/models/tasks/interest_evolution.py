"""Train a model of clicks that also predicts the next id of a sequence (DIEN, arXiv 1809.03672, section 4.2)."""

from __future__ import annotations

import torch

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.models.tasks.click import ClickTask
from pipeline.models.tasks.click_metrics import Prediction


@register("task", "interest_evolution")
class InterestEvolutionTask(ClickTask):
    """Compute ClickTask's loss. In training, the output is [batch, 2], and `auxiliary_weight` of the
    config times the mean of its last column is added.
    """

    def __init__(self, config: ModelConfig, tables: list[Table]) -> None:
        super().__init__(config, tables)
        self._weight: float = getattr(config, "auxiliary_weight", 1.0)

    def forward(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Prediction]:
        loss, prediction = super().forward(logits[:, :1], batch)
        if self.training:
            loss = loss + self._weight * (batch.sample_weights * logits[:, 1].float()).mean()
        return loss, prediction._replace(loss=loss.detach())
