"""Measure links between nodes and differences of clocks, with the process group that training would
use.

All pairs of nodes take turns in rounds in which each node takes part once (the circle method): H
nodes take H - 1 rounds. Every rank calls all collective functions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from pipeline.runtime.process.distributed import DistributedContext

EXCHANGES = 20  # of a small message, for latency and clocks
REPEATS = 3
Value = TypeVar("Value")


@dataclass(frozen=True)
class Link:
    """A link between the ranks of two nodes. latency_s: seconds that a message of 8 bytes takes, one way."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float


def gather(context: DistributedContext, value: Value) -> list[Value]:
    """Collective: return on all ranks the list of the values of each rank."""
    found: list[Value] = [value] * context.world_size
    dist.all_gather_object(found, value)
    return found


def rounds_of_pairs(members: list[int]) -> list[list[tuple[int, int]]]:
    """Pair all members with each other, in rounds. The pairs of a round share no member."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def measure_links(context: DistributedContext, members: list[int], num_bytes: int) -> list[Link]:
    """Collective: measure both directions between all pairs of `members`, one rank of each node."""
    own = []
    small, large = (torch.ones(n, device=context.device) for n in (2, max(1, num_bytes // 4)))
    for pairs in rounds_of_pairs(members):
        dist.barrier()
        for first, second in pairs:
            if context.rank not in (first, second):
                continue
            other, begins = (second, True) if context.rank == first else (first, False)
            latency_s = min(_exchange(small, small, other, begins) for _ in range(EXCHANGES)) / 2
            for sends in (begins, not begins):  # the large message is sent, then received
                messages = (large, small) if sends else (small, large)
                times = [_exchange(*messages, other, sends) for _ in range(REPEATS + 1)][1:]
                if sends:
                    seconds = max(statistics.median(times) - latency_s, 1e-9)
                    own.append(Link(context.rank, other, large.numel() * 4 / seconds, latency_s))
    links = [link for found in gather(context, own) for link in found]
    return sorted(links, key=lambda link: (link.source, link.target))


def _exchange(sent: torch.Tensor, answer: torch.Tensor, other: int, begins: bool) -> float:
    """Return the seconds for sending a message and receiving the answer. The rank with `begins` sends first."""
    received = torch.empty_like(answer)
    _wait(received)
    begun = time.perf_counter()
    if begins:
        dist.send(sent, other)
    dist.recv(received, other)
    if not begins:
        dist.send(sent, other)
    _wait(received)
    return time.perf_counter() - begun


def _wait(tensor: torch.Tensor) -> None:
    """Wait until the device has computed the tensor, by reading one of its numbers."""
    tensor.view(-1)[-1].item()


def measure_all_to_all(context: DistributedContext, num_bytes: int) -> float:
    """Collective: return bytes per second in an all-to-all, measured on the slowest rank."""
    share = max(1, num_bytes // 4 // context.world_size)
    sent = torch.ones(share * context.world_size, device=context.device)
    received, times = torch.empty_like(sent), []
    for _ in range(REPEATS + 1):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_to_all_single(received, sent)
        _wait(received)
        times.append(time.perf_counter() - begun)
    slowest = max(gather(context, statistics.median(times[1:])))
    return share * 4 * (context.world_size - 1) / max(slowest, 1e-9)


def clock_offsets(
    context: DistributedContext, members: list[int], clock: Callable[[], float] = time.time
) -> dict[int, tuple[float, float]]:
    """Collective: return the seconds that each member's clock is ahead of rank 0's, and the error bound.

    Cristian's algorithm (1989): the bound is half the round trip of the fastest exchange.
    """
    own: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    message = torch.zeros(1, dtype=torch.float64, device=context.device)
    for member in members:
        exchanges = []
        for _ in range(EXCHANGES if member else 0):
            if context.rank == 0:
                sent = clock()
                dist.send(message, member)
                dist.recv(message, member)
                there, received = float(message.item()), clock()
                exchanges.append((received - sent, there - (sent + received) / 2))
            elif context.rank == member:
                dist.recv(message, 0)
                dist.send(message.fill_(clock()), 0)
        if exchanges:
            round_trip, offset = min(exchanges)
            own[member] = offset, round_trip / 2
    return gather(context, own)[0]
