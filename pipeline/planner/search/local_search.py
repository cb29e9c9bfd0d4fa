"""Improve an assignment by taking a few tables out and putting them back better."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from pipeline.planner.search.problem import Assignment
from pipeline.planner.search.ranks import RankState

MAX_TRIED = 6  # tables of the slowest ranks that are moved one at a time before several are taken out at once
MAX_TAKEN_OUT = 8
WARMTH = 2e-3  # of the value: by how much a step may be worse at first
REFRESH_EVERY = 200  # steps between sums made anew, free of rounding
PROVEN = 1e-4  # a gap that counts as none


def improve(
    state: RankState,
    start: Assignment,
    *,
    steps: int,
    seed: int,
    bound: float,
    stop: Callable[[], bool],
) -> Assignment:
    """The best assignment met in `steps` steps from `start`; the same for a seed unless `stop` cuts it short."""
    return _Climb(state, start, random.Random(seed)).run(steps, bound, stop)


class _Climb:
    """One run: `state` moves about, `best` stays."""

    def __init__(self, state: RankState, start: Assignment, generator: random.Random) -> None:
        self.state, self.generator = state, generator
        state.restore(start)
        self.best, self.best_value = start, state.value
        self.current = state.smooth_value
        self.num_tables = len(start.choices)
        self.by_size = [max(float(cost.sum()) for cost in mine) for mine in state.costs]

    def run(self, steps: int, bound: float, stop: Callable[[], bool]) -> Assignment:
        for step in range(steps):
            if self.best_value <= bound * (1 + PROVEN) or stop():
                break
            if step and step % REFRESH_EVERY == 0:
                self.state.restore(self.state.assignment())
                self.current = self.state.smooth_value
            candidates = self._on_slowest_rank()
            if not self._move_one(candidates):
                self._ruin_and_recreate(candidates, warmth=WARMTH * (1 - step / steps))
            if self.state.value < self.best_value * (1 - 1e-9):
                self.best, self.best_value = self.state.assignment(), self.state.value
        return self.best

    def _on_slowest_rank(self) -> list[int]:
        """Tables with a shard on the rank that sets one of the maxima, in random order."""
        state = self.state
        maximum = self.generator.choices(range(state.load.shape[1]), weights=state.load.max(axis=0) + 1e-12)[0]
        rank = int(state.load[:, maximum].argmax())
        tables = sorted([*state.everywhere, *state.on_rank[rank]])
        self.generator.shuffle(tables)
        return tables

    def _move_one(self, candidates: list[int]) -> bool:
        """Put one table elsewhere or shard it otherwise, where that lowers the value."""
        state = self.state
        for table in candidates[:MAX_TRIED]:
            choice, ranks = state.choices[table], state.ranks[table]
            assert choice is not None
            state.take(table)
            found = state.find_best(table)
            if found is not None:
                state.put(table, *found)
                if (value := state.smooth_value) < self.current * (1 - 1e-9):
                    self.current = value
                    return True
                state.take(table)
            state.put(table, choice, ranks)
        return False

    def _ruin_and_recreate(self, candidates: list[int], warmth: float) -> None:
        """Take some tables out, half of them from the slowest rank, and put each back where it is best."""
        state, generator = self.state, self.generator
        count = min(self.num_tables, generator.randint(2, MAX_TAKEN_OUT))
        taken = dict.fromkeys(candidates[: max(1, count // 2)])
        while len(taken) < count:
            taken.setdefault(generator.randrange(self.num_tables))
        before = {table: (state.choices[table], state.ranks[table]) for table in taken}
        for table in taken:
            state.take(table)
        placed = []
        for table in sorted(taken, key=lambda table: -self.by_size[table] * (0.7 + 0.6 * generator.random())):
            found = state.find_best(table)
            if found is None:
                break
            state.put(table, *found)
            placed.append(table)
        value = state.smooth_value
        slack = -warmth * self.current * math.log(max(1e-9, generator.random())) * 0.3
        if len(placed) == len(taken) and value <= self.current + slack:
            self.current = value
            return
        for table in placed:
            state.take(table)
        for table, (choice, ranks) in before.items():
            assert choice is not None
            state.put(table, choice, ranks)
