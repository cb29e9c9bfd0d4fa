"""Improve an assignment by integer programs over a few ranks at a time (HiGHS), while all else stays where it lies.

Local search exchanges two shards; where memory is full, a better plan may need five to move at once. A program frees the tables
of some ranks, a few of which it may shard otherwise; a host's other ranks count as one, as full as the fullest of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its parts load when they are used: the integer programs take a third of a second

from pipeline.planner.search.exact import equal_tables
from pipeline.planner.search.local_search import Home
from pipeline.planner.search.problem import Assignment, Floats, Option, Ranks, Rule, SearchProblem
from pipeline.planner.search.ranks import RankState

NUM_FREED = (2, 3, 4, 6)  # ranks of a program,
MOST_WAYS = 80  # fewer where their tables times ranks are more than this
NUM_FLEXIBLE = 6  # tables of those ranks that may be sharded otherwise
NUM_SPREAD = 3  # tables on many ranks that may be, too
NODES = 100  # of a program: its end on every machine
GAP = 1e-4  # relative; nearer to a program's optimum nobody needs
SHARPNESS = 60.0  # how much more likely than others the slowest ranks are freed
REPAIRS = (
    0.7  # share of the programs after one in vain that free an overfull rank, where there is one: loads may be even
)
FILLED = 0.6  # share of the other freed ranks that are taken from those of least load
TARGET = 0.5  # of the way from a maximum to the mean of its ranks: load above it counts
EXCESS = 0.02  # what it counts beside the maxima
MEAN = 0.1  # what the mean of all ranks counts beside the maxima
OVERFULL = 0.4  # of the value: what a whole rank's memory too much counts at first,
PATIENCE = 40  # and twice as much after so many programs in a row that led to nothing better
SAVED = 0.1  # of that: what any memory counts meanwhile
GIVE_UP = 60  # programs in a row that led to nothing better
LEAST_GAIN = 1e-9  # of the potential, and of memory: less is rounding


def improve_by_programs(
    state: RankState,
    start: Assignment,
    *,
    rounds: int,
    seed: int,
    enough: float,
    remaining_s: Callable[[], float],
) -> Assignment | None:
    """The best assignment met in `rounds` programs from `start`, or the first of at most `enough` milliseconds.

    `start` may overfill ranks: that is lowered first, and None is returned where it never fits. The same for a seed unless no
    seconds of the clock remain.
    """
    return _Neighbourhoods(state, start, random.Random(seed)).run(rounds, enough, remaining_s)


class _Neighbourhoods:
    """`state` moves to what lowers the potential: the value, and less of it loads above targets, the mean, overfull ranks."""

    def __init__(self, state: RankState, start: Assignment, generator: random.Random) -> None:
        self.state, self.problem, self.generator = state, state.problem, generator
        self.group_of = [0] * len(start.choices)
        for group in equal_tables(self.problem):
            for table in group:
                self.group_of[table] = group[0]
        self.room_ms = OVERFULL * state.scale_ms / np.maximum(self.problem.capacity.max(axis=0), 1.0)  # [M], a byte
        self.in_vain = 0  # programs in a row that led to nothing better
        state.restore(start)

    def run(self, rounds: int, enough: float, remaining_s: Callable[[], float]) -> Assignment | None:
        best: Assignment | None = None
        best_value = np.inf
        for number in range(rounds + 1):
            if not self._is_overfull() and self.state.value < best_value:
                best, best_value = self.state.assignment(), self.state.value
            done = number == rounds or best_value <= enough or (self.in_vain == GIVE_UP and best is not None)
            if done or (seconds := remaining_s()) <= 0:
                break
            self.in_vain = 0 if self._step(seconds) else self.in_vain + 1
            if self.in_vain and self.in_vain % PATIENCE == 0 and self._is_overfull():
                self.room_ms = 2 * self.room_ms
        return best

    def _step(self, seconds: float) -> bool:
        """Solve one program, and go to its solution where that lowers the potential."""
        state = self.state
        highest, mean = state.load.max(axis=0), state.load.mean(axis=0)
        targets = highest - TARGET * (highest - mean)
        freed = self._choose_ranks()
        tables, flexible = self._choose_tables(freed)
        if not tables:  # all that lies on these ranks is cut by columns, or lies on several hosts
            return False
        before = self._potential(targets)
        members = self._group(tables, flexible)
        room_ms = self.room_ms if self._is_overfull() else None
        homes: dict[int, Home] = {}
        for table in tables:
            homes[table] = (state.choices[table] or 0, state.ranks[table])
            state.take(table)
        found = _Program(state, freed, members).solve(targets, room_ms, seconds)
        self._put(found or homes)
        better = self._potential(targets) < before * (1 - LEAST_GAIN)
        if found is not None and not better:
            for table in tables:
                state.take(table)
            self._put(homes)
        state.restore(state.assignment())
        return found is not None and better

    def _put(self, homes: dict[int, Home]) -> None:
        for table, home in homes.items():
            self.state.put(table, *home)

    def _potential(self, targets: Floats) -> float:
        load = self.state.load
        excess = float(np.maximum(load - targets, 0.0).sum())
        too_much = float((self._too_much() * self.room_ms).sum())
        if too_much:
            too_much += SAVED * float((self.state.memory * self.room_ms).sum())
        return self.state.value + EXCESS * excess + MEAN * float(load.mean(axis=0).sum()) + too_much

    def _too_much(self) -> Floats:
        """[R, M] bytes beyond the capacity."""
        too_much = np.maximum(self.state.memory - self.problem.capacity, 0.0)
        return np.where(too_much > LEAST_GAIN * self.problem.capacity, too_much, 0.0)

    def _is_overfull(self) -> bool:
        return bool(self._too_much().any())

    def _choose_ranks(self) -> list[int]:
        """One of the slowest, or an overfull one where the last program was in vain; some that may have room for what it has too much of."""
        state, count = self.state, self.problem.world_size
        share = self._too_much().max(axis=1) / np.maximum(self.problem.capacity.max(), 1.0)
        highest = state.load.max(axis=0)
        slowness = np.exp(SHARPNESS * len(highest) * (state.load - highest) / highest.sum()).mean(axis=1)
        repairs = self.in_vain > 0 and share.any() and self.generator.random() < REPAIRS
        first = self.generator.choices(range(count), (share if repairs else slowness).tolist())[0]
        filled = (state.memory / np.maximum(self.problem.capacity, 1.0)).max(axis=1)
        wanted = min(count, self.generator.choice(NUM_FREED))
        by_load = np.argsort(filled if share[first] > 0 else state.load.sum(axis=1), kind="stable").tolist()
        freed, tables = {first: None}, len(self._singles(first))
        while len(freed) < wanted:
            emptier = self.generator.random() < FILLED
            rank = self.generator.choice(by_load[: max(wanted, count // 2)] if emptier else by_load)
            tables += 0 if rank in freed else len(self._singles(rank))
            if len(freed) >= NUM_FREED[0] and tables * (len(freed) + 1) > MOST_WAYS:
                break
            freed.setdefault(rank)
        return sorted(freed)

    def _singles(self, rank: int) -> list[int]:
        """Tables that lie on this rank alone and may lie on any."""
        tables, choices = self.problem.tables, self.state.choices
        return [table for table in self.state.on_rank[rank] if _is_single(tables[table][choices[table] or 0])]

    def _choose_tables(self, freed: list[int]) -> tuple[list[int], set[int]]:
        """Tables to take out, and those of them that may be sharded otherwise."""
        tables, choices = self.problem.tables, [choice or 0 for choice in self.state.choices]
        single = [table for rank in freed for table in self._singles(rank)]
        spread = [
            table
            for table, choice in enumerate(choices)
            if tables[table][choice].rule in (Rule.EVERY_RANK, Rule.ONE_HOST)
        ]
        spread = self.generator.sample(spread, min(NUM_SPREAD, len(spread)))
        return single + spread, {*spread, *self.generator.sample(single, min(NUM_FLEXIBLE, len(single)))}

    def _group(self, tables: list[int], flexible: set[int]) -> list[tuple[list[int], list[int]]]:
        """Tables that are equal for a program, and the options that they may have."""
        groups: dict[tuple[int, int], list[int]] = {}
        for table in tables:
            choice = -1 if table in flexible else self.state.choices[table] or 0
            groups.setdefault((self.group_of[table], choice), []).append(table)
        return [
            (members, list(range(len(self.problem.tables[group]))) if choice < 0 else [choice])
            for (group, choice), members in groups.items()
        ]


class _Places:
    """What is loaded apart: each freed rank, then of each host its other ranks as one."""

    def __init__(self, problem: SearchProblem, freed: Sequence[int]) -> None:
        hosts = np.arange(problem.world_size).reshape(-1, problem.ranks_per_host)
        others = [host[~np.isin(host, freed)] for host in hosts]
        self.ranks: list[Ranks] = [np.array([rank]) for rank in freed] + [ranks for ranks in others if len(ranks)]
        self.number = np.empty(problem.world_size, dtype=np.intp)
        for place, ranks in enumerate(self.ranks):
            self.number[ranks] = place

    def largest(self, values: Floats) -> Floats:
        """[places, .] of [R, .]."""
        return np.array([values[ranks].max(axis=0) for ranks in self.ranks])

    def spread(self, ranks: Ranks, values: Floats) -> Floats:
        """[places, .] of [distinct ranks, .]: the largest that any rank of a place gets."""
        spread = np.zeros((len(self.ranks), values.shape[1]))
        np.maximum.at(spread, self.number[ranks], values)
        return spread


@dataclass(frozen=True, eq=False)
class _Way:
    """One way to lay a table of a group, and what each place gets by it: load [places, maxima], bytes [places, M]."""

    group: int
    choice: int
    ranks: Ranks
    load: Floats
    memory: Floats


class _Program:
    """Variables: of each way how many tables have it, the maxima, kinds that come into use, excess and too much memory."""

    def __init__(self, state: RankState, freed: list[int], members: list[tuple[list[int], list[int]]]) -> None:
        """`state` without the freed tables; `members`: tables that are equal, and the options that they may have."""
        self.state, self.problem, self.members = state, state.problem, members
        self.places, self.num_freed = _Places(self.problem, freed), len(freed)
        self.kinds = state.unused_kinds
        self.ways = [way for group in range(len(members)) for way in self._ways_of(group)]

    def _ways_of(self, group: int) -> Iterator[_Way]:
        tables, choices = self.members[group]
        every = np.arange(self.problem.world_size)
        for choice in choices:
            option, cost = self.problem.tables[tables[0]][choice], self.state.costs[tables[0]][choice]
            spans: list[Ranks] = []
            if _is_single(option):
                spans = self.places.ranks[: self.num_freed]
            elif option.rule is Rule.EVERY_RANK:
                spans = [every]
            elif option.rule is Rule.ONE_HOST:
                spans = list(every.reshape(-1, self.problem.ranks_per_host))
            for ranks in spans:
                load, memory = self.places.spread(ranks, cost), self.places.spread(ranks, option.memory)
                yield _Way(group, choice, ranks, load, memory)

    def solve(self, targets: Floats, room_ms: Floats | None, seconds: float) -> dict[int, Home] | None:
        """New options and ranks, or None. `room_ms` [M]: what a byte too much costs; None: no place may be overfull."""
        loads = self.places.largest(self.state.load)
        room = self.places.largest(self.state.memory - self.problem.capacity)
        num_places, maxima = loads.shape
        counts = [len(self.ways), maxima, len(self.kinds), self.num_freed * maxima, room.size]
        first = np.cumsum([0, *counts])
        unit = np.maximum(np.tile(self.problem.capacity.max(axis=0), num_places), 1.0)
        load = np.array([way.load.ravel() for way in self.ways]).T
        memory = np.array([way.memory.ravel() for way in self.ways]).T / unit[:, None]

        def rows(count: int, *blocks: tuple[int, Floats]) -> Floats:
            matrix = np.zeros((count, int(first[-1])))
            for part, block in blocks:
                matrix[:, first[part] : first[part + 1]] = block
            return matrix

        low = self.num_freed * maxima
        below = scipy.optimize.LinearConstraint
        constraints = [
            below(rows(len(load), (0, load), (1, np.tile(-np.eye(maxima), (num_places, 1)))), -np.inf, -loads.ravel()),
            below(
                rows(low, (0, load[:low]), (3, -np.eye(low))),
                -np.inf, np.tile(targets, self.num_freed) - loads.ravel()[:low],
            ),
            below(rows(room.size, (0, memory), (4, -np.eye(room.size))), -np.inf, -room.ravel() / unit),
            *self._rules(rows),
        ]  # fmt: skip
        means = MEAN * np.array([self._total(way) for way in self.ways]) / self.problem.world_size
        if room_ms is not None:
            means += SAVED * np.array([float((self._option(way).memory * room_ms).sum()) for way in self.ways])
        too_much = np.zeros(room.size) if room_ms is None else np.tile(room_ms, num_places) * unit
        goal = np.concatenate([means, np.ones(maxima), list(self.kinds.values()), np.full(low, EXCESS), too_much])
        upper = np.full(len(goal), np.inf)
        upper[: counts[0]] = [len(self.members[way.group][0]) for way in self.ways]
        if room_ms is None:
            upper[first[4] :] = np.maximum(room.ravel() / unit, 0.0)  # of what is there anyway, by rounding
        whole = np.zeros(len(goal))
        whole[: counts[0]] = 1
        found = scipy.optimize.milp(
            goal, constraints=constraints, integrality=whole, bounds=scipy.optimize.Bounds(0.0, upper),
            options={"node_limit": NODES, "time_limit": seconds, "mip_rel_gap": GAP},
        )  # fmt: skip
        return None if found.x is None else self._read(found.x)

    def _rules(self, rows: Callable[..., Floats]) -> Iterator[scipy.optimize.LinearConstraint]:
        """Each table has one way; a kind with ways in use is in use; hosts hold what they may."""
        sizes = np.array([len(tables) for tables, _ in self.members], dtype=float)
        groups = np.array([way.group for way in self.ways])
        one_each = (np.arange(len(sizes))[:, None] == groups).astype(float)
        yield scipy.optimize.LinearConstraint(rows(len(sizes), (0, one_each)), sizes, sizes)
        kinds = np.array([self._option(way).kind for way in self.ways])
        for position, kind in enumerate(self.kinds):
            for group, size in enumerate(sizes):
                mine = np.where((kinds == kind) & (groups == group), 1.0, 0.0)
                used = np.zeros(len(self.kinds))
                used[position] = -size
                if mine.any():
                    yield scipy.optimize.LinearConstraint(rows(1, (0, mine), (2, used)), -np.inf, 0.0)
        if (caps := self.state.host_caps) is not None:
            hosts = np.array([self._on_hosts(way) for way in self.ways]).T
            room = (caps - self.state.host_sums()).ravel()
            unit = np.maximum(np.where(np.isfinite(caps.ravel()), caps.ravel(), 1.0), 1.0)
            finite = np.isfinite(room)
            block = rows(int(finite.sum()), (0, hosts[finite] / unit[finite, None]))
            yield scipy.optimize.LinearConstraint(block, -np.inf, room[finite] / unit[finite])

    def _option(self, way: _Way) -> Option:
        return self.problem.tables[self.members[way.group][0][0]][way.choice]

    def _total(self, way: _Way) -> float:
        return float(self.state.costs[self.members[way.group][0][0]][way.choice].sum())

    def _on_hosts(self, way: _Way) -> Floats:
        """[hosts * M] bytes."""
        taken = np.zeros((self.problem.num_hosts, self.problem.num_memories))
        np.add.at(taken, way.ranks // self.problem.ranks_per_host, self._option(way).memory)
        return taken.ravel()

    def _read(self, values: Floats) -> dict[int, Home]:
        left = [list(tables) for tables, _ in self.members]
        homes: dict[int, Home] = {}
        for way, value in zip(self.ways, values[: len(self.ways)], strict=True):
            for _ in range(round(float(value))):
                homes[left[way.group].pop()] = (way.choice, way.ranks)
        return homes


def _is_single(option: Option) -> bool:
    return option.rule is Rule.ANY_RANK and option.num_shards == 1
