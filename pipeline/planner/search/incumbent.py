"""Hold a search's state: the best assignment, the bound, the options that are still worth trying,
the clock.

The clock counts CPU seconds of the search's thread, so that a busy machine finds the same plan as
an idle machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.config.registry import if_installed
from pipeline.planner.search import exact
from pipeline.planner.search.local_search import PROVEN
from pipeline.planner.search.problem import (
    Assignment,
    SearchProblem,
    dominates,
    narrow,
    score,
    violations,
    worth_trying,
)
from pipeline.planner.search.relaxation import Relaxation

SLACK = 0.3  # of the gap: local search tries options that cost at most this more than the cheapest


@dataclass(frozen=True)
class SearchConfig:
    """`seconds` of CPU is an outer limit (WorkClock); all other limits count work.

    The search ends when the gap is at most `gap_tolerance`, but not before TorchRec's proposals
    were tried.
    """

    objective: str = "critical_path"
    seed: int = 0
    seconds: float = 60.0
    gap_tolerance: float = PROVEN
    proposal_placements: int = 300_000  # placed shards in TorchRec's proposals
    # options times sets of kinds with a latency; above it one relaxation is used for all
    kinds_work: int = 100_000
    start_steps: int = 200  # of local search from each start
    local_steps: tuple[int, ...] = (3000, 4000, 6000)
    # of groups of equal tables; with more options, no bound by patterns of a rank
    bound_options: int = 120
    bound_patterns: int = 2500  # searched at most
    anneal_moves: int = 40_000_000  # at most, in each annealing
    choice_nodes: int = 300  # of the integer program that chooses options
    easy_variables: int = 1200  # of an integer program that is mostly solved in seconds
    exact_variables: int = 8000  # a larger integer program is not tried
    exact_work: int = 1_500_000  # nodes times variables


class Infeasible(Exception):
    """No assignment was found. `proven`: it is proven that none fits the capacities."""

    def __init__(self, proven: bool) -> None:
        super().__init__("no assignment exists" if proven else "no assignment was found")
        self.proven = proven


class Incumbent:
    """The state that all methods of a search share."""

    def __init__(self, problem: SearchProblem, config: SearchConfig) -> None:
        self.problem, self.config = problem, config
        self.clock = WorkClock(config.seconds)
        self.cut_short = False
        self.best: Assignment | None = None
        self.best_value = np.inf
        self.winner = ""
        self.values: dict[str, float] = {}
        self.bound = 0.0
        self.late = problem.kind_ms
        self.worthwhile = worth_trying(problem)
        if not all(self.worthwhile):
            raise Infeasible(proven=True)
        self.kept = self.worthwhile
        self.small = narrow(problem, self.kept)
        can_bound = if_installed("can_bound_plans")
        self.has_patterns = can_bound is not None and can_bound(self.small, config.bound_options)
        self.twins = [group for group in exact.equal_tables(problem) if len(group) > 1]

    def used(self, share: float = 1.0) -> bool:
        late = self.clock.has_used(share)
        self.cut_short = self.cut_short or late
        return late

    def done(self) -> bool:
        return self.near_enough() or self.used()

    def near_enough(self) -> bool:
        return self.best_value <= self.bound * (1 + max(PROVEN, self.config.gap_tolerance))

    def offer(self, member: str, assignment: Assignment) -> None:
        """Keep an assignment of the complete problem if it is valid and the best so far."""
        if violations(self.problem, assignment):
            return
        value = score(self.problem, assignment).of(self.config.objective)
        self.values[member] = min(value, self.values.get(member, np.inf))
        if value < self.best_value:
            self.best, self.best_value, self.winner = assignment, value, member

    def value(self, assignment: Assignment) -> float:
        return score(self.problem, assignment).of(self.config.objective)

    def worth(self, relaxation: Relaxation, share: float, using: Assignment) -> list[list[int]]:
        """Return the options that cost at most a share of the gap, and the options of the best assignment."""
        assert relaxation.bound_ms is not None
        ceiling = max(0.0, self.best_value * (1 + 1e-6) - relaxation.bound_ms) * share
        used = [
            indices[choice]
            for indices, choice in zip(self.worthwhile, self.within(self.worthwhile, using), strict=True)
        ]
        kept = [
            [index for index, extra in zip(indices, raises, strict=True) if extra <= ceiling or index == own]
            for indices, raises, own in zip(self.worthwhile, relaxation.raises_ms, used, strict=True)
        ]
        for group in self.twins:  # equal tables keep the same options, so that they stay equal
            union = sorted({index for table in group for index in kept[table]})
            for table in group:
                kept[table] = union
        return kept

    def narrow(self, relaxation: Relaxation) -> None:
        """Drop the options that no better plan can contain."""
        if self.best is not None and relaxation.bound_ms is not None:
            self.kept = self.worth(relaxation, 1.0, self.best)
            self.small = narrow(self.problem, self.kept)

    def within(self, kept: list[list[int]], whole: Assignment) -> list[int]:
        """Return the choices as indexes into options `kept`. An option that is not kept is replaced
        by a dominating one.
        """
        choices = []
        for options, indices, choice in zip(self.problem.tables, kept, whole.choices, strict=True):
            if choice not in indices:
                choice = next(other for other in indices if dominates(options[other], options[choice], self.late))
            choices.append(indices.index(choice))
        return choices


MAX_WAITING = 4.0  # wall seconds per CPU second of the limit, because a search must end anyway


def whole(kept: list[list[int]], small: Assignment) -> Assignment:
    """Convert an assignment of options `kept` into an assignment of the complete problem."""
    choices = [indices[choice] for indices, choice in zip(kept, small.choices, strict=True)]
    return Assignment(choices, small.ranks)


class WorkClock:
    """Limit work to `limit_s` CPU seconds, and to MAX_WAITING times as many wall seconds."""

    def __init__(
        self, limit_s: float, cpu: Callable[[], float] = time.thread_time, wall: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = limit_s
        self._cpu, self._wall = cpu, wall
        self._cpu_begin, self._wall_begin = cpu(), wall()

    @property
    def wall_s(self) -> float:
        return self._wall() - self._wall_begin

    @property
    def busy(self) -> float:
        """Return the wall seconds per CPU second so far, at least 1."""
        cpu_s = self._cpu() - self._cpu_begin
        return max(1.0, self.wall_s / cpu_s) if cpu_s > 0.01 else 1.0

    def has_used(self, share: float = 1.0) -> bool:
        cpu_s = self._cpu() - self._cpu_begin
        return cpu_s > share * self.limit_s or self.wall_s > share * self.limit_s * MAX_WAITING

    @property
    def remaining_s(self) -> float:
        """Return the wall seconds that remain for a solver, if the machine stays as busy as it was."""
        left = (self.limit_s - (self._cpu() - self._cpu_begin)) * min(self.busy, MAX_WAITING)
        return min(left, self.limit_s * MAX_WAITING - self.wall_s)
