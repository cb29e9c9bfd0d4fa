"""Improve an assignment: exchange shards, change options, and place a few tables again."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipeline.planner.search.problem import Assignment, Floats, Ranks
from pipeline.planner.search.ranks import RankState

MAX_TRIED = 6  # tables of a rank whose option is changed before the next rank's turn
MAX_TAKEN_OUT = 8
MIN_GAIN = 1e-9  # of the value; less is rounding
# of the maxima, one after another: at first all loads count, later the highest
SHARPNESS = (100.0, 300.0, 1000.0, 3000.0)
RELEVANT = 0.01  # of a maximum's exponentials; a rank with less is not worth relieving
REFRESH_EVERY = 200  # changes after which sums are computed again, free of rounding errors
PROVEN = 1e-4  # a gap that counts as none
Home = tuple[int, Ranks]  # a table's option and ranks


def improve(
    state: RankState,
    start: Assignment,
    *,
    steps: int,
    seed: int,
    bound: float,
    stop: Callable[[], bool],
    tolerance: float = PROVEN,
) -> Assignment:
    """Return the best assignment found in `steps` steps, or the first assignment within `tolerance`
    of `bound`.

    The result is the same for a seed unless `stop` ends it early.
    """
    return _Climb(state, start, random.Random(seed), bound * (1 + max(PROVEN, tolerance)), stop).run(steps)


class _Climb:
    """Run one local search. `state` changes, `best` is kept. `before`: the ranks of tables before the last kick."""

    def __init__(
        self, state: RankState, start: Assignment, generator: random.Random, enough: float, stop: Callable[[], bool]
    ) -> None:
        self.state, self.generator, self.enough, self.stop = state, generator, enough, stop
        state.restore(start)
        self.best, self.best_value = start, state.value
        self.num_tables = len(start.choices)
        self.by_size = [max(float(cost.sum()) for cost in costs) for costs in state.costs]
        self.before: dict[int, Home] = {}
        self.changes = self.steps = 0

    def run(self, steps: int) -> Assignment:
        for level, sharpness in enumerate(SHARPNESS, start=1):
            self.state.sharpen(sharpness)
            self._climb(steps * level // len(SHARPNESS))
        return self.best

    def _climb(self, until: int) -> None:
        """Descend until no step helps, then make a random kick and descend again. Undo kicks that did not help."""
        self._descend(until)
        while self.steps < until and not self._done():
            self.before, value = {}, self.state.smooth_value
            self._ruin_and_recreate()
            self._descend(until)
            if self.state.smooth_value > value * (1 + 1e-12):
                self._undo()

    def _done(self) -> bool:
        return self.best_value <= self.enough or self.stop()

    def _descend(self, until: int) -> None:
        tried: set[int] = set()
        while self.steps < until and not self._done():
            rank = self._rank_to_relieve(tried)
            if rank is None:
                return
            self.steps += 1
            if self._exchange(rank) or self._shard_otherwise(rank):
                tried.clear()
                self._note()
            else:
                tried.add(rank)

    def _note(self) -> None:
        if self.state.value < self.best_value * (1 - 1e-9):
            self.best, self.best_value = self.state.assignment(), self.state.value
        self.changes += 1
        if self.changes % REFRESH_EVERY == 0:
            self.state.restore(self.state.assignment())

    def _rank_to_relieve(self, tried: set[int]) -> int | None:
        """Return the rank with the largest weight in the smooth value, whose load is to be reduced."""
        soft = self.state.soft
        weight = (soft.exponentials / soft.sums).sum(axis=1)
        weight[list(tried)] = 0.0
        rank = int(weight.argmax())
        return rank if weight[rank] >= RELEVANT else None

    def _exchange(self, rank: int) -> bool:
        """Exchange a free shard of the rank with another rank's shard, or move it, if this lowers the value."""
        state, soft, free = self.state, self.state.soft, self.state.free
        local = np.flatnonzero(free.ranks[: free.num_rows] == rank)
        if not len(local):
            return False
        others = np.flatnonzero((free.ranks != rank) & (free.ranks >= 0))
        there = free.ranks[others]
        change = free.cost[:, None, others] - free.cost[:, local, None]  # [maxima, local, others]
        values = soft.exchanged(state.load, rank, there, change)
        values[~self._fit(rank, there, free.memory[others][None] - free.memory[local][:, None])] = np.inf
        best = int(values.argmin())
        if not values.flat[best] < soft.value - MIN_GAIN * abs(soft.value):
            return False
        index, other = divmod(best, len(others))
        self._swap(int(local[index]), int(others[other]))
        return True

    def _fit(self, rank: int, there: Ranks, change: Floats) -> NDArray[np.bool_]:
        """Return [local, others]: whether memory suffices if `rank` gains `change` [.., .., M] and `there` loses it."""
        memory, capacity = self.state.memory, self.state.problem.capacity
        room, other_room = capacity[rank] - memory[rank], capacity[there] - memory[there]
        fits: NDArray[np.bool_] = ((change <= room) & (-change <= other_room)).all(axis=-1)
        if self.state.host_caps is not None:
            free = self.state.host_caps - self.state.host_sums()
            host, hosts = rank // self.state.problem.ranks_per_host, there // self.state.problem.ranks_per_host
            fits &= ((change <= free[host]) & (-change <= free[hosts])).all(axis=-1) | (hosts == host)
        return fits

    def _swap(self, local: int, other: int) -> None:
        """Exchange the ranks of two rows of FreeShards."""
        free = self.state.free
        ends = {local: int(free.ranks[other]), other: int(free.ranks[local])}
        rows = [row for row in ends if row < free.num_rows]
        homes = {table: self._lift(table) for table in dict.fromkeys(free.tables[rows].tolist())}
        moved = {table: ranks.copy() for table, (_, ranks) in homes.items()}
        for row in rows:
            table = int(free.tables[row])
            moved[table][row - free.first[table]] = ends[row]
        for table, ranks in moved.items():
            self.state.put(table, homes[table][0], ranks)

    def _lift(self, table: int) -> Home:
        """Remove a table and return its option and ranks. `before` keeps its first ones for an undo."""
        choice, ranks = self.state.choices[table], self.state.ranks[table]
        assert choice is not None
        self.state.take(table)
        self.before.setdefault(table, (choice, ranks))
        return choice, ranks

    def _shard_otherwise(self, rank: int) -> bool:
        """Change the option or ranks of a table on the rank. Take the first change that lowers the value."""
        state = self.state
        tables = [*state.on_rank[rank], *state.everywhere]
        self.generator.shuffle(tables)
        for table in tables[:MAX_TRIED]:
            value, known = state.smooth_value, table in self.before
            self.steps += 1
            home = self._lift(table)
            found = state.find_best(table)
            if found is not None:
                state.put(table, *found)
                if state.smooth_value < value - MIN_GAIN * abs(value):
                    return True
                state.take(table)
            state.put(table, *home)
            if not known:
                del self.before[table]
        return False

    def _ruin_and_recreate(self) -> None:
        """Place some tables again, one by one, half of them from the slowest ranks."""
        state, generator = self.state, self.generator
        rank = self._rank_to_relieve(set())
        near = [] if rank is None else list(state.on_rank[rank])
        generator.shuffle(near)
        count = min(self.num_tables, generator.randint(2, MAX_TAKEN_OUT))
        taken = dict.fromkeys(near[: max(1, count // 2)])
        while len(taken) < count:
            taken.setdefault(generator.randrange(self.num_tables))
        for table in taken:
            self._lift(table)
        for table in sorted(taken, key=lambda table: -self.by_size[table] * (0.7 + 0.6 * generator.random())):
            found = state.find_best(table)
            if found is None:
                self._undo()
                return
            state.put(table, *found)
        self.steps += count
        self._note()

    def _undo(self) -> None:
        for table in self.before:
            if self.state.choices[table] is not None:
                self.state.take(table)
        for table, home in self.before.items():
            self.state.put(table, *home)
        self.before = {}
