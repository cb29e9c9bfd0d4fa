"""Time one call often enough to trust its median, within a budget of seconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import psutil
import torch

from pipeline.planner.step_time.measurements import Measurement, Number, median_and_spread

PASSES = 3  # over all that is measured: what other guests of the same processor slow down for seconds is measured again
LEAST_REPEATS, MOST_REPEATS = 3, 200
LONG_S = 0.01  # such a call needs no more repeats: other passes measure it again
LEAST_TIMED_S = 2e-4  # shorter calls are timed several at once
COLLECTIVES = ("shared_", "gloo_")  # begin their kinds
REFERENCE_SIZE = 384  # of the square product that is repeated throughout
Item = TypeVar("Item")


@dataclass
class Bench:
    """Collects measurements of one rank. `seconds_each`: of one shape; `scale`: of all budgets."""

    setup: str
    scale: float = 1.0
    seconds_each: float = 0.004
    rows: list[Measurement] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter
    # Rank 0's answer on every rank, which so begin each shape together and measure as many.
    agree: Callable[[bool], bool] = lambda wanted: wanted

    @property
    def is_by_cpu(self) -> bool:
        return self.clock is time.process_time

    def within(self, seconds: float, shapes: Iterable[Item], least: int = 4) -> Iterator[Item]:
        """Shapes until the seconds are over; the reference operation is timed ahead of each kind."""
        self.time_reference()
        end = self.clock() + seconds * self.scale
        for number, shape in enumerate(shapes):
            if not self.agree(number < least or self.clock() < end):
                return
            yield shape

    def time(self, kind: str, shape: dict[str, Number], call: Callable[[], object]) -> None:
        seconds, spread = time_call(call, self.seconds_each, self.clock)
        self.add(kind, shape, seconds, spread)

    def add(
        self,
        kind: str,
        shape: dict[str, Number],
        seconds: float,
        spread: float,
        beside: Mapping[str, float] | None = None,
    ) -> None:
        probes = {name: round(us, 2) for name, us in (beside or {}).items()}
        self.rows.append(Measurement(kind, self.setup, shape, round(1e6 * seconds, 4), round(spread, 4), probes))

    def time_reference(self) -> None:
        square = torch.ones(REFERENCE_SIZE, REFERENCE_SIZE)
        self.reference.append(time_call(lambda: square @ square, 0.02, self.clock)[0])


def fastest(rows: Iterable[Measurement]) -> list[Measurement]:
    """Of each kind and shape the measurement that was disturbed least, for other work never makes a call shorter.

    Of collectives the mean, for how long a rank takes to wake up is chance. What one pass alone has come to is left out where
    the passes have met others of its kind again.
    """
    found: dict[tuple[str, str], list[Measurement]] = {}
    for row in rows:
        found.setdefault((row.kind, json.dumps(row.shape, sort_keys=True)), []).append(row)
    most: dict[str, int] = {}
    for (kind, _), same in found.items():
        most[kind] = max(most.get(kind, 0), len(same))
    return [_one_of(same) for (kind, _), same in found.items() if len(same) > 1 or most[kind] == 1]


def _one_of(same: list[Measurement]) -> Measurement:
    least = min(same, key=lambda row: row.us)
    is_collective = least.kind.startswith(COLLECTIVES)
    return replace(least, us=sum(row.us for row in same) / len(same)) if is_collective else least


def time_call(
    call: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Median seconds of a call, and their spread, after two calls that warm up; of a call that is long, the second one's."""
    call()
    started = clock()
    call()
    once = max(clock() - started, 1e-7)
    if once > LONG_S:
        return once, 0.0
    at_once = max(1, int(LEAST_TIMED_S / once))
    repeats = int(min(MOST_REPEATS, max(LEAST_REPEATS, seconds / (once * at_once))))
    times = []
    for _ in range(repeats):
        started = clock()
        for _ in range(at_once):
            call()
        times.append((clock() - started) / at_once)
    return median_and_spread(times)


class Load:
    """Cores that programs other than this one and its children take, between its start and `busy_cores`."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def busy_cores(self) -> float:
        others = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others / max(time.monotonic() - self._started, 1e-9))


def _busy_seconds() -> float:
    """Of all cores; time that the hypervisor gave to others counts."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0) + getattr(times, "softirq", 0.0))


def _own_seconds() -> float:
    """Of this process, of its children that have ended, and of those that run."""
    ended = os.times()
    total = ended.user + ended.system + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total
