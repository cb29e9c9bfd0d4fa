"""The click task over logits that a test gives, for tests that have labels and no model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.models.tasks.click import ClickTask


class Clicks(nn.Module):
    """forward(batch, logits) -> (loss, prediction)"""

    def __init__(self) -> None:
        super().__init__()
        self.task = ClickTask(ModelConfig(), [])

    def forward(self, batch: Batch, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.task(logits, batch)

    def losses(self, prediction: Any) -> torch.Tensor:
        return self.task.losses(prediction)


def labelled(labels: torch.Tensor, weights: torch.Tensor | None = None) -> Batch:
    """A batch of these labels, without features; `weights` are 1 where none are given."""
    ids = keyed_jagged_tensor([], torch.empty(0), torch.empty(0), len(labels), [])
    return Batch(torch.empty(len(labels), 0), ids, labels, torch.ones(len(labels)) if weights is None else weights)
