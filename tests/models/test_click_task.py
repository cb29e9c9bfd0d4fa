"""The click task's loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.runtime.errors import ConfigError
from tests.support.clicks import Clicks, labelled
from tests.support.messages import names


def test_loss_is_weighted_cross_entropy_and_padding_counts_nothing() -> None:
    logits, labels = torch.tensor([1.0, -2.0, 50.0]), torch.tensor([1.0, 0.0, 0.0])
    loss, prediction = Clicks()(labelled(labels, torch.tensor([1.0, 1.0, 0.0])), logits[:, None])
    expected = F.binary_cross_entropy_with_logits(logits[:2], labels[:2], reduction="sum") / 3
    assert loss.item() == pytest.approx(expected.item())
    assert prediction.logits.shape == (3,)


@pytest.mark.parametrize(
    ("output", "says"),
    [(torch.zeros(3, 2), "[3, 2] 3 rows"), (torch.zeros(()), "[] 3 rows"), ((torch.zeros(3),), "a tuple 3 rows")],
)
def test_a_model_that_does_not_give_a_logit_a_row_is_told_so(output: object, says: str) -> None:
    with pytest.raises(ConfigError, match=names(says)):
        Clicks()(labelled(torch.zeros(3)), output)
