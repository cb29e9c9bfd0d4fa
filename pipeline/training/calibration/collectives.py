"""Time collectives by size between the CPU ranks of a calibration: through shared memory on one host, and by gloo."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipeline.devices.cpu.host_exchange import AVERAGE, FLAGS, HostExchange, connect
from pipeline.planner.step_time.measurements import median_and_spread
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.calibration.clock import Bench

SIZES = (512, 8 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20)  # bytes that a rank hands in
BYTES_A_ROUND = 24 << 20
LEAST_ROUNDS, MOST_ROUNDS = 6, 40
OUTLIERS = 10  # the slowest of so many rounds is left out


def measure_collectives(bench: Bench, context: DistributedContext) -> None:
    """Collective: nothing on one rank. The bytes of a row are what a rank hands in, for all ranks together."""
    if context.world_size == 1:
        return
    exchange = connect(context, 60.0)
    for size in SIZES:
        for kind, call in _calls(context, exchange, size).items():
            _time(bench, kind, size, context.world_size, call)


def _calls(context: DistributedContext, exchange: HostExchange | None, size: int) -> dict[str, Callable[[], object]]:
    world = context.world_size
    count = max(size // 4 // world, 1) * world
    whole, part = torch.ones(count), torch.ones(count // world)
    into = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "gloo_all_to_all": lambda: dist.all_to_all_single(into, whole),
        "gloo_reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "gloo_all_gather": lambda: dist.all_gather_into_tensor(into, part),
        "gloo_all_reduce": lambda: dist.all_reduce(into),
    }
    if exchange is not None:
        calls["shared_all_to_all"] = lambda: _exchange(exchange, list(whole.split(count // world)))
        calls["shared_all_reduce"] = lambda: exchange.all_reduce(AVERAGE, into)
    return calls


def _exchange(exchange: HostExchange, parts: list[torch.Tensor]) -> torch.Tensor:
    """As pooled rows go: each rank gets a part of every other's, and puts them side by side."""
    number = exchange.post(FLAGS, [[part] for part in parts])
    own = parts[exchange.rank]
    messages = exchange.take(FLAGS, number)
    return torch.cat([own if message is None else message.read(own.shape, own.dtype) for message in messages])


def _time(bench: Bench, kind: str, size: int, ranks: int, call: Callable[[], object]) -> None:
    """The same number of calls on every rank; into a row goes the mean on this one.

    Not the median: a rank that sleeps wakes up at once or milliseconds later, and steps meet both.
    """
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, BYTES_A_ROUND // size))
    bench.agree(True)
    times = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    ordered = sorted(times[2:])
    kept = ordered[: len(ordered) - len(ordered) // OUTLIERS]
    bench.add(kind, {"bytes": size, "ranks": ranks}, sum(kept) / len(kept), median_and_spread(ordered)[1])
