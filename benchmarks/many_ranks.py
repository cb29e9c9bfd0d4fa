"""Simulate steps of many ranks: each has clocks of its own, its work varies, and a collective begins when the last rank is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.extras.step_time.clocks import CLOCKS, COMMS, COMPUTE, HOST, Floats
from pipeline.extras.step_time.prediction import SheetLayers
from pipeline.planner.plan_record import PHASES, RankLoad


@dataclass(frozen=True)
class Unevenness:
    """Assumptions on how ranks differ. spread: of the logarithm of any work's time, by rank and step; straggles: the share of
    work that takes `times_as_long`; slow_ranks: the share of ranks that are slower throughout, by `slower_by`."""

    spread: float = 0.03
    straggles: float = 1e-4
    times_as_long: float = 5.0
    slow_ranks: float = 0.0
    slower_by: float = 0.1


EVEN = Unevenness(spread=0.0, straggles=0.0)


class RankClocks:
    """As clocks.Clocks, of [ranks] GPUs."""

    def __init__(self, ranks: int, unevenness: Unevenness, generator: np.random.Generator) -> None:
        self._ranks, self._uneven, self._generator = ranks, unevenness, generator
        self.now: dict[str, Floats] = {clock: np.zeros(ranks) for clock in CLOCKS}
        self.slow = np.where(generator.random(ranks) < unevenness.slow_ranks, 1 + unevenness.slower_by, 1.0)

    def issue(self, name: str, ms: float) -> None:
        self.now[HOST] = self.now[HOST] + self._varied(np.full(self._ranks, ms))

    def compute(self, name: str, ms: Floats, after: Floats | None = None) -> Floats:
        start = self.now[COMPUTE] if after is None else np.maximum(self.now[COMPUTE], after)
        self.now[COMPUTE] = start + self._varied(ms)
        return self.now[COMPUTE]

    def communicate(self, name: str, ms: Floats, after: Floats) -> Floats:
        """All ranks take as long as the slowest of `ms`, from when the last of them has come."""
        begun = float(np.maximum(self.now[COMMS], after).max())
        self.now[COMMS] = np.full(self._ranks, begun + float(ms.max()))
        return self.now[COMMS]

    def wait(self, until: Floats) -> None:
        self.now[COMPUTE] = np.maximum(self.now[COMPUTE], until)

    def later(self, one: Floats, other: Floats) -> Floats:
        return np.maximum(one, other)

    def next_step(self, read_ms: float) -> None:
        """Each rank's next step begins where its last one ended, and no sooner than the reader has its batch."""
        ended = np.maximum.reduce([self.now[clock] for clock in CLOCKS])
        begin = np.maximum(ended, read_ms)
        self.now = {clock: begin.copy() for clock in CLOCKS}

    def _varied(self, ms: Floats) -> Floats:
        uneven = self._uneven
        times = np.exp(self._generator.normal(0.0, uneven.spread, self._ranks)) if uneven.spread else 1.0
        straggling = self._generator.random(self._ranks) < uneven.straggles
        varied: Floats = ms * self.slow * times * np.where(straggling, uneven.times_as_long, 1.0)
        return varied


def simulate(
    layers: SheetLayers,
    loads: Sequence[RankLoad],
    unevenness: Unevenness,
    *,
    read_ms: float = 0.0,
    steps: int = 200,
    seed: int = 0,
) -> float:
    """Mean milliseconds of a step. read_ms: what a rank's reader takes for a batch, ahead of the step by as much as it can."""
    phase = {name: np.array([getattr(load, name) for load in loads]) for name in PHASES}
    clocks = RankClocks(len(loads), unevenness, np.random.default_rng(seed))
    for step in range(steps):
        layers.walk(clocks, phase)
        clocks.next_step(read_ms * (step + 1))
    return float(max(times.max() for times in clocks.now.values())) / steps
