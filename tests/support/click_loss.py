"""The guarded loss of clicks alone, for tests that have logits and labels and no model."""

from __future__ import annotations

import torch

from pipeline.config.model import ModelConfig
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.models.tasks.click import ClickTask
from pipeline.models.tasks.guard import GuardedLoss


def click_loss(max_in_a_row: int = 0) -> GuardedLoss:
    return GuardedLoss(ClickTask(ModelConfig(), []), max_in_a_row)


def labelled(labels: torch.Tensor, weights: torch.Tensor | None = None) -> Batch:
    """A batch of these labels, without features; `weights` are 1 where none are given."""
    ids = keyed_jagged_tensor([], torch.empty(0), torch.empty(0), len(labels), [])
    return Batch(torch.empty(len(labels), 0), ids, labels, torch.ones(len(labels)) if weights is None else weights)
