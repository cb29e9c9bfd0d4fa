"""The click task's loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.clicks import Clicks, labelled


def test_loss_is_weighted_cross_entropy_and_padding_counts_nothing() -> None:
    logits, labels = torch.tensor([1.0, -2.0, 50.0]), torch.tensor([1.0, 0.0, 0.0])
    loss, prediction = Clicks()(labelled(labels, torch.tensor([1.0, 1.0, 0.0])), logits[:, None])
    expected = F.binary_cross_entropy_with_logits(logits[:2], labels[:2], reduction="sum") / 3
    assert loss.item() == pytest.approx(expected.item())
    assert prediction.logits.shape == (3,)
