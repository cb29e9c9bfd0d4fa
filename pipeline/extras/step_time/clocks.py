"""Predict a step's time with three clocks: the host that issues work, the device that computes, the
network.

On a CPU the host computes, so host and device are one clock. The rule is that of arXiv 2201.07821,
section 4: work starts when its clock is free and its inputs are ready; the step ends with the last
clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Time = TypeVar("Time", float, Floats)  # milliseconds of one rank, or of each rank
HOST, COMPUTE, COMMS = "host", "compute", "communication"
CLOCKS = (HOST, COMPUTE, COMMS)


@dataclass(frozen=True)
class Span:
    """Hold the work of one name on one clock."""

    name: str
    clock: str
    start_ms: float
    ms: float

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.ms


class StepClocks(Protocol[Time]):
    """The interface of the clocks of one rank (Clocks) or of many ranks (RankClocks)."""

    def issue(self, name: str, ms: float) -> None: ...

    def compute(self, name: str, ms: Time, after: Time | None = None) -> Time: ...

    def communicate(self, name: str, ms: Time, after: Time) -> Time: ...

    def wait(self, until: Time) -> None: ...

    def later(self, one: Time, other: Time) -> Time: ...


@dataclass
class Clocks:
    """Hold the clocks of one rank. `host_computes`: host and device are one clock, as on a CPU."""

    host_computes: bool
    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLOCKS, 0.0))
    spans: list[Span] = field(default_factory=list)

    def issue(self, name: str, ms: float) -> None:
        """Add the host's work for a step. The host runs ahead of the device, so neither waits for the other."""
        self._run(name, HOST, ms, 0.0)

    def compute(self, name: str, ms: float, after: float | None = None) -> float:
        """Add work of `ms` on the device. Return the time when it ends."""
        clock = HOST if self.host_computes else COMPUTE
        self._run(name, clock, ms, after or 0.0)
        self.now[COMPUTE] = self.now[clock]
        return self.now[COMPUTE]

    def communicate(self, name: str, ms: float, after: float | None = None) -> float:
        """Send after the time `after`. Return the time when sending ends.

        If `after` is None, sending starts at once, and the host copies the data and waits.
        """
        start = max(self.now[COMMS], self.now[HOST] if after is None else after)
        if after is None:
            self.now[HOST] = self.now[COMPUTE] = start + ms
        if ms:
            self.spans.append(Span(name, COMMS, start, ms))
        self.now[COMMS] = start + ms
        return self.now[COMMS]

    def wait(self, until: float) -> None:
        """Let later work on the device start after the time `until`."""
        self.now[COMPUTE] = max(self.now[COMPUTE], until)
        if self.host_computes:
            self.now[HOST] = max(self.now[HOST], until)

    def later(self, one: float, other: float) -> float:
        return max(one, other)

    @property
    def end_ms(self) -> float:
        return max(self.now.values())

    def _run(self, name: str, clock: str, ms: float, after: float) -> None:
        start = max(self.now[clock], after)
        if ms:
            self.spans.append(Span(name, clock, start, ms))
        self.now[clock] = start + ms
