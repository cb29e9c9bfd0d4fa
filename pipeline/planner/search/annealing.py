"""Improve an assignment by several runs of simulated annealing, which try some million changes per
second (Numba).

It starts from the best plan, or from the cheapest choice of options, which may overfill ranks.
During the search, overfull ranks are allowed but add to the cost, because if memory is nearly full,
a better plan can often only be reached through plans that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from pipeline.planner.search import exact
from pipeline.planner.search.incumbent import SLACK, Incumbent, whole
from pipeline.planner.search.problem import Assignment, Floats, Ranks, Rule, SearchProblem, narrow, violations
from pipeline.planner.search.ranks import project
from pipeline.planner.search.relaxation import Relaxation

MANY_RANKS = 64  # with more ranks, swapping two random tables hardly ever improves the plan
MAX_TABLES = 5000  # that are compared with each other
NEAREST = 32  # number of tables with similar cost, for each table
LEVELS = 60  # of the temperature


class Schedule(NamedTuple):
    """Hold values at the first and the last level. They change by a constant factor from level to level."""

    sharpness: tuple[float, float]  # of the maxima, in units of one over the value
    heat: tuple[float, float]  # in units of the value: the temperature
    # in units of the value: the price of exceeding memory by one rank's memory
    overfull: tuple[float, float]


EVEN_LOADS = Schedule((30.0, 6000.0), (7e-4, 3.5e-6), (1.0, 50.0))
# for many ranks, where a high temperature needs far more moves without a better result
COOL = Schedule((300.0, 10_000.0), (7e-5, 1e-6), (1.0, 50.0))
# hot enough to rearrange what is on the ranks
FULL_RANKS = Schedule((20.0, 600.0), (1e-2, 1e-4), (1.0, 10.0))


class Packed(NamedTuple):
    """Hold a problem as arrays. Options are numbered through all tables. `key`: equal for options
    that differ only in size.

    T tables, O options of all tables, S shards of all options, R ranks, H hosts, P maxima, M kinds
    of memory, K kinds with a latency, W shards of an option at most.
    """

    first_option: Ranks  # [T + 1]
    first_shard: Ranks  # [O + 1]
    rule: Ranks  # [O]
    kind: Ranks  # [O] -1: it has no latency
    key: Ranks  # [O] -1: it has no latency
    distinct: Ranks  # [O] 1: no two shards on one rank
    cost: Floats  # [O] 1: no two shards on one rank
    memory: Floats  # [S, M]
    capacity: Floats  # [R, M]
    host_capacity: Floats  # [H, M]
    latency: Floats  # [K]
    alike: Ranks  # [T, N] the tables nearest in cost, N is 0 where they are not known


class Laid(NamedTuple):
    """Hold an assignment with its loads. `over` [1]: the bytes beyond the capacities."""

    choices: Ranks  # [T] numbers of options
    ranks: Ranks  # [T, W]
    load: Floats  # [R, P]
    memory: Floats  # [R, M]
    host_memory: Floats  # [H, M]
    used: Ranks  # [K] tables
    over: Floats  # [1]
    highest: Floats  # [P] the reference of the exponents
    powers: Floats  # [R, P]
    sums: Floats  # [P] of `powers`
    weights: Floats  # [R] the share of a rank in the sums, updated from time to time


class Change(NamedTuple):
    """Hold the effect of a move: the new options and ranks of tables, and the changed loads of ranks and hosts."""

    counts: Ranks  # [3] tables, ranks touched, hosts touched
    tables: Ranks  # [2]
    choices: Ranks  # [2]
    ranks: Ranks  # [2, W]
    touched: Ranks  # [R]
    is_touched: Ranks  # [R]
    load: Floats  # [R, P]
    memory: Floats  # [R, M]
    powers: Floats  # [R, P]
    hosts: Ranks  # [H]
    is_host: Ranks  # [H]
    host_memory: Floats  # [H, M]
    used: Ranks  # [K]
    sums: Floats  # [P]
    least: Floats  # [P] lower limits of their factors


def can_anneal() -> bool:
    return find_spec("numba") is not None


def improve_by_annealing(
    problem: SearchProblem,
    start: Assignment,
    objective: str,
    *,
    schedule: Schedule,
    moves: int,
    seed: int,
    scale_ms: float,
    stop: Callable[[], bool],
) -> Assignment | None:
    """Return the best assignment found that fits, including `start`, or None.

    `start` may overfill ranks. scale_ms: the approximate value of the objective. The result is the
    same for a seed unless `stop` ends it.
    """
    annealing = Annealing(problem, start, objective, seed)
    for level in range(LEVELS):
        if stop():
            break
        annealing.go(moves // LEVELS, scale_ms, schedule, level / (LEVELS - 1))
    return annealing.found()


class Annealing:
    """Hold the search's state: `choices` and `ranks` change; `best_*` keep the best, whose value is `best`."""

    def __init__(self, problem: SearchProblem, start: Assignment, objective: str, seed: int) -> None:
        self.problem = problem
        self.packed = pack(problem, objective)
        self.num_shards = np.diff(self.packed.first_shard)
        self.choices = self.packed.first_option[:-1] + np.array(start.choices)
        self.ranks = np.zeros((len(problem.tables), int(self.num_shards.max())), dtype=np.int64)
        for table, ranks in enumerate(start.ranks):
            self.ranks[table, : len(ranks)] = ranks
        self.best_choices, self.best_ranks, self.best = self.choices.copy(), self.ranks.copy(), np.array([np.inf])
        self.seed = np.array([seed], dtype=np.uint64)
        self.change = _no_change(self.packed, self.ranks.shape[1])
        room = problem.capacity.max(axis=0)
        # bytes of the scarcest memory
        self.unit = float(room[room > 0].min()) if (room > 0).any() else 1.0
        self.taken = 0

    def go(self, moves: int, scale_ms: float, schedule: Schedule, share: float) -> None:
        """Run one temperature level, at the fraction `share` of the way from the first level to the last."""
        from pipeline.planner.search.annealing_kernels import anneal

        sharpness, heat, overfull = (low * (high / low) ** share for low, high in schedule)
        per_ms = sharpness * self.packed.cost.shape[1] / scale_ms
        self.laid = self._lay(per_ms)
        self.taken = anneal(
            self.packed, self.laid, self.best_choices, self.best_ranks, self.change, self.problem.ranks_per_host, moves,
            (per_ms, heat * scale_ms, overfull * scale_ms / self.unit), self.seed, self.best,
        )  # fmt: skip

    def found(self) -> Assignment | None:
        return self._assignment(self.best_choices, self.best_ranks) if np.isfinite(self.best[0]) else None

    def now(self) -> Assignment:
        return self._assignment(self.choices, self.ranks)

    def _assignment(self, choices: Ranks, ranks: Ranks) -> Assignment:
        return Assignment(
            (choices - self.packed.first_option[:-1]).tolist(),
            [row[:count].copy() for row, count in zip(ranks, self.num_shards[choices], strict=True)],
        )

    def _lay(self, per_ms: float) -> Laid:
        """Return an assignment with its sums computed again, so that no rounding errors remain."""
        problem, packed = self.problem, self.packed
        cost, memory = np.zeros((problem.world_size, packed.cost.shape[1])), np.zeros_like(packed.capacity)
        for choice, row in zip(self.choices.tolist(), self.ranks, strict=True):
            shards = slice(packed.first_shard[choice], packed.first_shard[choice + 1])
            ranks = row[: self.num_shards[choice]]
            np.add.at(cost, ranks, packed.cost[shards])
            np.add.at(memory, ranks, packed.memory[shards])
        hosts = memory.reshape(problem.num_hosts, problem.ranks_per_host, -1).sum(axis=1)
        over = np.maximum(memory - packed.capacity, 0.0).sum() + np.maximum(hosts - packed.host_capacity, 0.0).sum()
        kinds = packed.kind[self.choices]
        used = np.bincount(kinds[kinds >= 0], minlength=len(packed.latency))
        highest = cost.max(axis=0)
        powers = np.exp(per_ms * (cost - highest))
        return Laid(
            self.choices, self.ranks, cost, memory, hosts, used, np.array([over]), highest, powers, powers.sum(axis=0),
            np.zeros(problem.world_size),
        )  # fmt: skip


def pack(problem: SearchProblem, objective: str) -> Packed:
    """Return the problem as arrays for the kernel."""
    options = [option for table in problem.tables for option in table]
    kinds, rules = problem.kind_ms, list(Rule)
    keys: dict[tuple[Rule, str, int, bool], int] = {}
    key = [(option.rule, option.kind, option.num_shards, option.distinct_ranks) for option in options]
    caps = problem.host_caps
    return Packed(
        first_option=np.cumsum([0, *map(len, problem.tables)], dtype=np.int64),
        first_shard=np.cumsum([0, *(option.num_shards for option in options)], dtype=np.int64),
        rule=np.array([rules.index(option.rule) for option in options]),
        kind=np.array([list(kinds).index(option.kind) if option.kind in kinds else -1 for option in options]),
        key=np.array([keys.setdefault(each, len(keys)) for each in key]),
        distinct=np.array([int(option.distinct_ranks) for option in options]),
        cost=np.concatenate([project(option, objective) for option in options]),
        memory=np.concatenate([option.memory for option in options]),
        capacity=problem.capacity.astype(float),
        host_capacity=np.full((problem.num_hosts, problem.num_memories), np.inf)
        if caps is None
        else np.array(caps, dtype=float),
        latency=np.array(list(kinds.values()), dtype=float),
        alike=_alike(problem, objective),
    )


def _alike(problem: SearchProblem, objective: str) -> Ranks:
    """Return [T, N]: for each table the N tables whose options with one free shard are nearest in cost."""
    count = len(problem.tables)
    if problem.world_size <= MANY_RANKS or not NEAREST < count <= MAX_TABLES:
        return np.zeros((count, 0), dtype=np.int64)
    costs = []
    for options in problem.tables:
        free = [project(option, objective) for option in options if option.num_shards == 1] or [
            project(option, objective).mean(axis=0, keepdims=True) for option in options
        ]
        costs.append(min(free, key=lambda cost: float(cost.sum()))[0])
    vectors = np.array(costs)
    near = np.zeros((count, NEAREST), dtype=np.int64)
    for table in range(count):
        distance = np.abs(vectors - vectors[table]).sum(axis=1)
        distance[table] = np.inf
        near[table] = np.argsort(distance, kind="stable")[:NEAREST]
    return near


def _no_change(packed: Packed, widest: int) -> Change:
    (world, tiers), maxima, hosts, kinds = (
        packed.capacity.shape,
        packed.cost.shape[1],
        *map(len, (packed.host_capacity, packed.latency)),
    )

    def whole(*shape: int) -> Ranks:
        return np.zeros(shape, dtype=np.int64)

    return Change(
        counts=whole(3), tables=whole(2), choices=whole(2), ranks=whole(2, widest), touched=whole(world),
        is_touched=whole(world), load=np.zeros((world, maxima)), memory=np.zeros((world, tiers)),
        powers=np.zeros((world, maxima)), hosts=whole(hosts), is_host=whole(hosts), host_memory=np.zeros((hosts, tiers)),
        used=whole(kinds), sums=np.zeros(maxima), least=np.zeros(maxima),
    )  # fmt: skip


MIN_GAP = 0.02  # smaller gaps are not worth annealing's time
# of annealing, per table and rank; twice as many for even loads after a failed attempt
MOVES_EACH = 60_000
ALL_MOVES = 128  # ranks; with more, a table on every rank takes so long that fewer moves are made
ANNEALINGS = 8  # maximum number of annealings
# failed attempts in a row that end it; one if the integer program is easy and memory not scarce
ENOUGH_IN_VAIN = 3
ANNEALED_SHARE = 0.9  # of all seconds, after which annealing ends
ANNEALED_SHARE_OF_FEW_OPTIONS = 0.6  # if patterns of a rank give bounds afterwards
MIN_GAIN = 1e-4  # of the value; less counts as failed


class Restarts:
    def __init__(self, state: Incumbent) -> None:
        self.state = state
        self.annealed = state.config.anneal_moves > 0 and can_anneal()
        self.share = ANNEALED_SHARE_OF_FEW_OPTIONS if state.has_patterns else ANNEALED_SHARE

    def improve_by_annealing(
        self, relaxation: Relaxation, cheapest: Assignment | None, solve: Callable[[], None]
    ) -> None:
        """Anneal from the best plan, or from the cheapest choice if no plan fits yet.

        `solve` is called after the first attempt, because it may prove the plan optimal. If the
        cheapest choice overfills ranks, every second attempt starts from it at a high temperature
        and uses only its kinds. Half of the other attempts use only the kinds of their start.
        """
        overfull = cheapest is not None and bool(violations(self.state.problem, cheapest))
        is_easy = (
            self.state.best is not None and exact.count_variables(self.state.small) <= self.state.config.easy_variables
        )
        even = COOL if self.state.problem.world_size > MANY_RANKS else EVEN_LOADS
        in_vain, enough = 0, 1 if is_easy and not overfull else ENOUGH_IN_VAIN
        for attempt in range(ANNEALINGS if self.annealed else 0):
            hot = overfull and attempt % 2 == int(self.state.has_patterns and self.state.best is not None)
            start = cheapest if hot or self.state.best is None else self.state.best
            if start is None or in_vain == enough or self._is_near():
                return
            before = self.state.best_value
            if hot:
                self._anneal(start, relaxation, FULL_RANKS, attempt, self._num_moves())
            else:
                self._anneal(start, relaxation, even, attempt, self._num_moves() * 2**in_vain)
            in_vain = 0 if self.state.best_value < before * (1 - MIN_GAIN) else in_vain + 1
            if not attempt and not is_easy:  # an easy problem was tried before
                self.state.narrow(relaxation)
                solve()

    def _num_moves(self) -> int:
        world = self.state.problem.world_size
        moves = min(self.state.config.anneal_moves, MOVES_EACH * len(self.state.problem.tables) * world)
        return moves if world <= ALL_MOVES else int(moves * MANY_RANKS / world)

    def _anneal(self, start: Assignment, relaxation: Relaxation, schedule: Schedule, attempt: int, moves: int) -> None:
        config = self.state.config
        kept = self.state.worth(relaxation, 1.0 if schedule is FULL_RANKS else SLACK, start)
        if schedule is FULL_RANKS or attempt % 4 >= 2:
            kept = self._of_kinds_in_use(kept, start)
        found = improve_by_annealing(
            narrow(self.state.problem, kept),
            Assignment(self.state.within(kept, start), start.ranks),
            config.objective,
            schedule=schedule,
            moves=moves,
            seed=config.seed + attempt,
            scale_ms=min(self.state.best_value, 2 * self.state.bound),
            stop=partial(self.state.used, self.share),
        )
        if found is not None:
            self.state.offer("annealing", whole(kept, found))

    def _is_near(self) -> bool:
        return self.state.done() or self.state.best_value <= self.state.bound * (1 + MIN_GAP)

    def _of_kinds_in_use(self, kept: list[list[int]], using: Assignment) -> list[list[int]]:
        used = {options[choice].kind for options, choice in zip(self.state.problem.tables, using.choices, strict=True)}
        return [
            [index for index in indices if options[index].kind in used or options[index].kind not in self.state.late]
            for options, indices in zip(self.state.problem.tables, kept, strict=True)
        ]
