"""Measure the links between nodes by the process group that training would use.

One rank of each node sends to one rank of another, all pairs in rounds in which no node takes part twice (the circle method of
round-robin tournaments), so that H nodes take H - 1 rounds instead of H * (H - 1) / 2 turns. All collectives of this file are
called by every rank.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.runtime.process.distributed import DistributedContext

LATENCY_ROUNDS = 20
REPEATS = 3


@dataclass(frozen=True)
class Link:
    """From one node's rank to another's. bytes_per_s: of the payload; latency_s: of a message of 4 bytes, one way."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float


def rounds_of_pairs(members: list[int]) -> list[list[tuple[int, int]]]:
    """Each two members once, in rounds of pairs that share no member."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def measure_links(context: DistributedContext, members: list[int], num_bytes: int) -> list[Link]:
    """Collective: both directions between every two of `members` (ranks, one of each node); the same list on each rank."""
    own: list[Link] = []
    for pairs in rounds_of_pairs(members):
        dist.barrier()
        for first, second in pairs:
            if context.rank in (first, second):
                other = second if context.rank == first else first
                own += _measure_pair(context, other, num_bytes, begins=context.rank == first)
    found: list[list[Link]] = [[] for _ in range(context.world_size)]
    dist.all_gather_object(found, own)
    return sorted((link for links in found for link in links), key=lambda link: (link.source, link.target))


def measure_all_to_all(context: DistributedContext, num_bytes: int) -> float:
    """Collective: bytes a second that the slowest rank sends while all exchange `num_bytes` a rank, their own share left out."""
    share = max(1, num_bytes // 4 // context.world_size)
    sent = torch.ones(share * context.world_size, device=context.device)
    received = torch.empty_like(sent)
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        _wait(received)
        begun = time.perf_counter()
        dist.all_to_all_single(received, sent)
        _wait(received)
        times.append(time.perf_counter() - begun)
    slowest = torch.tensor(statistics.median(times[1:]), device=context.device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return share * 4 * (context.world_size - 1) / max(float(slowest), 1e-9)


def _measure_pair(context: DistributedContext, other: int, num_bytes: int, begins: bool) -> list[Link]:
    """What this rank sends to `other`; both measure in turns."""
    small, large = (torch.ones(count, device=context.device) for count in (1, max(1, num_bytes // 4)))
    round_trip = min(_exchange(context, other, small, small, begins) for _ in range(LATENCY_ROUNDS))
    found = []
    for sends in (begins, not begins):
        payload, answer = (large, small) if sends else (small, large)
        times = [_exchange(context, other, payload, answer, sends) for _ in range(REPEATS + 1)]
        if sends:
            seconds = max(statistics.median(times[1:]) - round_trip / 2, 1e-9)
            found.append(Link(context.rank, other, large.numel() * 4 / seconds, round_trip / 2))
    return found


def _exchange(
    context: DistributedContext, other: int, sent: torch.Tensor, received: torch.Tensor, begins: bool
) -> float:
    """Seconds of one message and the answer to it: `begins` sends first, the other side answers."""
    into = torch.empty_like(received)
    _wait(into)
    begun = time.perf_counter()
    if begins:
        dist.send(sent, other)
        dist.recv(into, other)
    else:
        dist.recv(into, other)
        dist.send(sent, other)
    _wait(into)
    return time.perf_counter() - begun


def _wait(tensor: torch.Tensor) -> None:
    """Until the device has done what the tensor depends on: reading a number of it waits for that."""
    tensor.view(-1)[-1].item()
