"""Measure how far the nodes' clocks stand apart, by messages to and from rank 0 (Cristian's algorithm, 1989)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipeline.runtime.process.distributed import DistributedContext

ROUNDS = 20


def clock_offsets(
    context: DistributedContext, members: list[int], clock: Callable[[], float] = time.time
) -> dict[int, tuple[float, float]]:
    """Collective: of each of `members`, the seconds that its clock is ahead of rank 0's, and how far off that may be.

    The estimate is from the quickest of 20 exchanges: half its round trip is the bound.
    """
    found: dict[int, tuple[float, float]] = {}
    for member in members:
        if member == 0:
            found[0] = (0.0, 0.0)
        elif context.rank == 0:
            found[member] = _ask(context, member, clock)
        elif context.rank == member:
            _answer(context, clock)
    known: list[object] = [found]
    dist.broadcast_object_list(known, device=context.device)
    offsets: dict[int, tuple[float, float]] = known[0]  # type: ignore[assignment]
    return offsets


def _ask(context: DistributedContext, member: int, clock: Callable[[], float]) -> tuple[float, float]:
    exchanges = []
    message = torch.zeros(1, dtype=torch.float64, device=context.device)
    for _ in range(ROUNDS):
        sent = clock()
        dist.send(message, member)
        dist.recv(message, member)
        there = float(message.item())
        received = clock()
        exchanges.append((received - sent, there - (sent + received) / 2))
    round_trip, offset = min(exchanges)
    return offset, round_trip / 2


def _answer(context: DistributedContext, clock: Callable[[], float]) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=context.device)
    for _ in range(ROUNDS):
        dist.recv(message, 0)
        message.fill_(clock())
        dist.send(message, 0)
