"""A loss that is not finite touches nothing, on any rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.models.tasks.guard import NonFiniteLossError
from tests.support.click_loss import click_loss, labelled
from tests.support.ranks import RankPool


def test_loss_is_weighted_cross_entropy_and_padding_counts_nothing() -> None:
    logits, labels = torch.tensor([1.0, -2.0, 50.0]), torch.tensor([1.0, 0.0, 0.0])
    loss, prediction = click_loss()(logits[:, None], labelled(labels, torch.tensor([1.0, 1.0, 0.0])))
    expected = F.binary_cross_entropy_with_logits(logits[:2], labels[:2], reduction="sum") / 3
    assert loss.item() == pytest.approx(expected.item())
    assert prediction.logits.shape == (3,)


def _gradient_after(rank: int, bad_rank: int, max_in_a_row: int) -> tuple[bool, int]:
    """Whether the layer got a gradient, and how many steps were skipped, when `bad_rank` sees a NaN label."""
    layer, loss = nn.Linear(2, 1), click_loss(max_in_a_row)
    labels = torch.tensor([float("nan") if rank == bad_rank else 1.0, 0.0])
    losses, _ = loss(layer(torch.ones(2, 2)), labelled(labels))
    torch.sum(losses, dim=0).backward()
    return layer.weight.grad is not None, loss.num_skipped


def test_one_ranks_bad_loss_is_skipped_on_all(ranks: RankPool) -> None:
    assert ranks.run(2, _gradient_after, 1, 3) == [(False, 1), (False, 1)]
    assert ranks.run(2, _gradient_after, -1, 3) == [(True, 0), (True, 0)]


def _wishes(rank: int, wishing_rank: int) -> bool:
    loss = click_loss()
    loss.stop_wanted = rank == wishing_rank
    loss(torch.zeros(2, requires_grad=True), labelled(torch.ones(2)))
    return loss.stop_agreed


def test_one_ranks_wish_to_stop_is_heard_by_all_at_the_same_step(ranks: RankPool) -> None:
    assert ranks.run(2, _wishes, 1) == [True, True]
    assert ranks.run(2, _wishes, -1) == [False, False]


def _raises(rank: int) -> str:
    with pytest.raises(NonFiniteLossError) as error:
        _gradient_after(rank, bad_rank=0, max_in_a_row=0)
    return str(error.value)


def test_policy_stop_raises_on_every_rank(ranks: RankPool) -> None:
    for message in ranks.run(2, _raises):
        assert "updated nothing" in message and "trainer.non_finite_loss=skip" in message


def test_skipping_ends_after_the_allowed_number_in_a_row() -> None:
    loss, nan = click_loss(max_in_a_row=2), torch.tensor([float("nan")])
    good = torch.zeros(1, requires_grad=True)
    for _ in range(2):
        loss(nan, labelled(torch.ones(1)))
        loss(nan, labelled(torch.ones(1)))
        loss(good, labelled(torch.ones(1)))  # a good one starts the count anew
    loss(nan, labelled(torch.ones(1)))
    loss(nan, labelled(torch.ones(1)))
    with pytest.raises(NonFiniteLossError, match="3 time"):
        loss(nan, labelled(torch.ones(1)))
    assert loss.num_skipped == 6
