"""A loss that is not finite touches nothing, on any rank; and what one rank says, all hear in the same step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.training.step_sync import NonFiniteLossError, StepSync
from tests.support.clicks import Clicks, labelled
from tests.support.ranks import RankPool


def _gradient_after(rank: int, bad_rank: int, max_in_a_row: int) -> tuple[bool, int, bool]:
    """When `bad_rank` sees a NaN label: whether the layer got a gradient, the steps skipped, whether metrics see it."""
    layer, task, sync = nn.Linear(2, 1), Clicks(), StepSync(max_in_a_row)
    labels = torch.tensor([float("nan") if rank == bad_rank else 1.0, 0.0])
    with sync.guarding(task):
        loss, prediction = task(labelled(labels), layer(torch.ones(2, 2)))
    torch.sum(loss, dim=0).backward()
    return layer.weight.grad is not None, sync.num_skipped, prediction is not None


def test_one_ranks_bad_loss_is_skipped_on_all(ranks: RankPool) -> None:
    assert ranks.run(2, _gradient_after, 1, 3) == [(False, 1, False), (False, 1, False)]
    assert ranks.run(2, _gradient_after, -1, 3) == [(True, 0, True), (True, 0, True)]


def _heard(rank: int, speaker: int, flag: str) -> tuple[bool, bool, bool]:
    task, sync = Clicks(), StepSync()
    setattr(sync, flag, rank == speaker)
    with sync.guarding(task):
        task(labelled(torch.ones(2)), torch.zeros(2, requires_grad=True))
    return sync.stop_agreed, sync.input_failure_agreed, sync.save_agreed


@pytest.mark.long
@pytest.mark.parametrize("flag", ["stop_wanted", "input_failed", "save_wanted"])
def test_what_one_rank_wants_is_heard_by_all_at_the_same_step(ranks: RankPool, flag: str) -> None:
    expected = tuple(name == flag for name in ("stop_wanted", "input_failed", "save_wanted"))
    assert ranks.run(2, _heard, 1, flag) == [expected, expected]
    assert ranks.run(2, _heard, -1, flag) == [(False, False, False)] * 2


def _bad_rows_and_messages(rank: int) -> tuple[int, int, int]:
    """Quarantined rows of all ranks, collectives that torch saw in 2 batches, and hooks that are left afterwards."""
    task, sync, weights = Clicks(), StepSync(), torch.tensor([1.0, 0.0 if rank else 1.0])
    with sync.guarding(task), torch.profiler.profile() as recorded:
        for _ in range(2):
            task(labelled(torch.ones(2), weights), torch.zeros(2, requires_grad=True))
    task(labelled(torch.ones(2), weights), torch.zeros(2, requires_grad=True))  # guarded no longer
    sent = sum(event.count for event in recorded.key_averages() if event.key == "c10d::allreduce_")
    return sync.num_bad_rows, sent, len(task._forward_hooks)


def test_a_batch_costs_one_all_reduce_at_most_and_the_guard_leaves_no_trace(ranks: RankPool) -> None:
    """Ranks of one host may exchange through memory instead, which torch does not see."""
    for bad_rows, sent, hooks in ranks.run(2, _bad_rows_and_messages):
        assert (bad_rows, hooks) == (2, 0) and sent <= 2


def _raises(rank: int) -> str:
    with pytest.raises(NonFiniteLossError) as error:
        _gradient_after(rank, bad_rank=0, max_in_a_row=0)
    dist.barrier()
    return str(error.value)


def test_policy_stop_raises_on_every_rank(ranks: RankPool) -> None:
    for message in ranks.run(2, _raises):
        assert "updated nothing" in message and "trainer.non_finite_loss=skip" in message


def test_skipping_ends_after_the_allowed_number_in_a_row() -> None:
    task, sync, ones = Clicks(), StepSync(max_in_a_row=2), torch.ones(1)
    good, nan = torch.zeros(1, requires_grad=True), torch.tensor([float("nan")])
    with sync.guarding(task):
        for _ in range(2):
            task(labelled(ones), nan)
            task(labelled(ones), nan)
            task(labelled(ones), good)  # a good one starts the count anew
        task(labelled(ones), nan)
        task(labelled(ones), nan)
        with pytest.raises(NonFiniteLossError, match="3 time") as error:
            task(labelled(ones), nan)
    assert sync.num_skipped == 6
    assert (error.value.rows, error.value.num_at_fault) == ([0], 1)


def test_evaluation_is_not_guarded() -> None:
    task, sync = Clicks().eval(), StepSync()
    with sync.guarding(task):
        loss, prediction = task(labelled(torch.ones(1)), torch.tensor([float("nan")]))
    assert loss.isnan() and prediction is not None and sync.in_a_row == 0
