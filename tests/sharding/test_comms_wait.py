"""A rank's waits for collectives are counted wherever gloo lets it block."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.sharding.collectives.comms_wait import CommsWait
from tests.support.click_loss import click_loss, labelled
from tests.support.ranks import RankPool

DELAY_S = 0.6


def _sleep(*_: Any) -> None:
    time.sleep(DELAY_S)


def _waited(rank: int, kind: str) -> tuple[float, bool]:
    """Seconds that a rank waits where rank 1 is late; and whether the clock has gone without a trace."""
    original, wait = dist.Work.wait, CommsWait()
    loss, layer = click_loss().train(), nn.parallel.DistributedDataParallel(nn.Linear(4, 1), static_graph=True)
    batch = labelled(torch.ones(8))
    with wait.clocked(loss):
        for _ in range(2):
            if kind == "sleeping":  # own time, not comms
                time.sleep(DELAY_S)
            value, _ = loss(layer(torch.ones(8, 4)), batch)
            if kind == "backward" and rank == 1:
                layer.module.weight.register_hook(_sleep)
            value.backward()
            if kind == "work" and rank == 1:
                time.sleep(DELAY_S)
    before = wait.seconds
    dist.barrier()
    return before, dist.Work.wait is original and not loss._forward_hooks and wait.seconds == before


@pytest.mark.parametrize("kind", ["work", "backward"])
def test_waiting_for_a_late_rank_is_counted_on_the_rank_that_waits(ranks: RankPool, kind: str) -> None:
    (waiting, clean), (late, _) = ranks.run(2, _waited, kind)
    print(kind, waiting, late)
    assert waiting > 0.9 * DELAY_S
    assert late < waiting - 0.5 * DELAY_S
    assert clean


def test_a_ranks_own_time_is_not_counted(ranks: RankPool) -> None:
    assert min(seconds for seconds, _ in ranks.run(2, _waited, "sleeping")) < 0.5 * DELAY_S
