"""Train a model whose logit is the mean of the logits of several streams, and each stream towards
the model (FinalNet, Zhu et al., SIGIR 2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.models.tasks.click import ClickTask
from pipeline.models.tasks.click_metrics import Prediction


@register("task", "distilled_streams")
class DistilledStreamsTask(ClickTask):
    """Compute ClickTask's loss of the mean logit. In training, add `distillation` of the config
    times the cross-entropy of each stream, whose target is the probability of the mean logit.

    The logits are [batch, num_streams] in training and [batch, 1] in evaluation. The targets get
    no gradient.
    """

    def __init__(self, config: ModelConfig, tables: list[Table]) -> None:
        super().__init__(config, tables)
        self._weight: float = getattr(config, "distillation", 1.0)

    def forward(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Prediction]:
        streams = logits.float()
        loss, prediction = super().forward(streams.mean(dim=1, keepdim=True), batch)
        if self.training:
            targets = torch.sigmoid(prediction.logits).unsqueeze(1).expand_as(streams)
            weights = batch.sample_weights.unsqueeze(1)
            losses = F.binary_cross_entropy_with_logits(streams, targets, weight=weights, reduction="none")
            loss = loss + self._weight * losses.sum(dim=1).mean()
        return loss, prediction._replace(loss=loss.detach())
