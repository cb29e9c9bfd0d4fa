"""Search with several methods, none of which wins everywhere, and say how far from the best possible the result can be.

TorchRec's own proposals come first, so that nothing worse comes out; a linear program bounds from below and its
shares choose options; local search and, where small enough, an integer program go on from the best.
Steps, proposals and nodes are counted, so a seed gives one result on any machine, unless `seconds` cuts it short.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeline.logs import progress
from pipeline.planner.search import exact
from pipeline.planner.search.local_search import PROVEN, improve
from pipeline.planner.search.problem import (
    Assignment,
    Rule,
    Score,
    SearchProblem,
    dominates,
    narrow,
    score,
    violations,
    worth_trying,
)
from pipeline.planner.search.proposals import try_proposals
from pipeline.planner.search.ranks import RankState, fill
from pipeline.planner.search.relaxation import SHARD_LIMITS, LinearProgram, Relaxation

MEMORY_WEIGHTS = (0.0, 0.3, 3.0)  # in units of the bound: what filling a rank's memory counts beside time


KIND_SETS = 8  # sets of kinds, the most promising, that options are chosen by


@dataclass(frozen=True)
class SearchConfig:
    """`seconds` is an outer stop; all else counts work, the same on every machine."""

    objective: str = "critical_path"
    seed: int = 0
    seconds: float = 60.0
    proposal_placements: int = 300_000  # of shards, in TorchRec's proposals
    kinds_work: int = 100_000  # options times sets of kinds with a latency: beyond it one relaxation stands for all
    local_steps: tuple[int, ...] = (300, 1000, 2000)
    easy_variables: int = 1200  # of an integer program that is mostly solved in seconds
    exact_variables: int = 8000  # a larger one is not tried
    exact_work: int = 1_500_000  # nodes times variables


@dataclass(frozen=True, eq=False)
class SearchResult:
    """`torchrec` is what TorchRec's planner would take; `torchrec_complete`: all of its proposals were tried."""

    assignment: Assignment
    score: Score
    lower_bound_ms: float
    gap: float
    winner: str
    seconds: float
    cut_short: bool
    torchrec: Score | None
    torchrec_complete: bool
    values: dict[str, float] = field(default_factory=dict)  # best of each member, by the objective


class Infeasible(Exception):
    """`proven`: no assignment keeps the capacities; else none was found."""

    def __init__(self, proven: bool) -> None:
        super().__init__("no assignment exists" if proven else "no assignment was found")
        self.proven = proven


def search(problem: SearchProblem, config: SearchConfig, warm_starts: Iterable[Assignment] = ()) -> SearchResult:
    """Raises Infeasible."""
    return _Search(problem, config).run(warm_starts)


class _Search:
    def __init__(self, problem: SearchProblem, config: SearchConfig) -> None:
        self.problem, self.config = problem, config
        self.started = time.monotonic()
        self.cut_short = False
        self.best: Assignment | None = None
        self.best_value = np.inf
        self.winner = ""
        self.values: dict[str, float] = {}
        self.bound = 0.0
        self.tried: set[tuple[int, int]] = (
            set()
        )  # sizes and work of integer programs: the same again would end the same
        self.late = problem.kind_ms
        self.worthwhile = worth_trying(problem)
        if not all(self.worthwhile):
            raise Infeasible(proven=True)
        self.kept = self.worthwhile
        self.small = narrow(problem, self.kept)

    def run(self, warm_starts: Iterable[Assignment]) -> SearchResult:
        config = self.config
        with progress("searching a plan", 4) as bar:
            program = LinearProgram(self.small, config.objective)
            relaxation = program.solve()
            if relaxation.bound_ms is None:
                raise Infeasible(proven=True)
            self.bound = relaxation.bound_ms
            for assignment in warm_starts:
                self._offer("warm start", assignment)
            torchrec = try_proposals(self.problem, config.objective, config.proposal_placements, self._out_of_time)
            if torchrec.best is not None:
                self._offer("torchrec", torchrec.best)
            bar.advance(1)
            self._place_guided(program, relaxation, self._by_kinds(program, relaxation))
            bar.advance(1)
            self._improve(relaxation)
            bar.advance(1)
            self._solve_exactly(config.exact_work)
            bar.advance(1)
        if self.best is None:
            raise Infeasible(proven=False)
        value = score(self.problem, self.best)
        return SearchResult(
            assignment=self.best,
            score=value,
            lower_bound_ms=min(self.bound, value.of(config.objective)),
            gap=max(0.0, value.of(config.objective) / self.bound - 1) if self.bound > 0 else 0.0,
            winner=self.winner,
            seconds=time.monotonic() - self.started,
            cut_short=self.cut_short,
            torchrec=None if torchrec.chosen is None else score(self.problem, torchrec.chosen),
            torchrec_complete=torchrec.complete,
            values=self.values,
        )

    def _out_of_time(self) -> bool:
        late = time.monotonic() - self.started > self.config.seconds
        self.cut_short = self.cut_short or late
        return late

    def _done(self) -> bool:
        return self.best_value <= self.bound * (1 + PROVEN) or self._out_of_time()

    def _offer(self, member: str, assignment: Assignment) -> None:
        """Keep an assignment of the whole problem if it is valid and the best so far."""
        if violations(self.problem, assignment):
            return
        value = score(self.problem, assignment).of(self.config.objective)
        self.values[member] = min(value, self.values.get(member, np.inf))
        if value < self.best_value:
            self.best, self.best_value, self.winner = assignment, value, member

    def _by_kinds(self, program: LinearProgram, first: Relaxation) -> list[Relaxation]:
        """One relaxation for each set of kinds that may do, where kinds have a latency: a plan uses one of these sets.

        So the least of their bounds bounds all plans.
        """
        assert first.bound_ms is not None
        if not self.late or self.small.num_options * 2 ** len(self.late) > self.config.kinds_work:
            return []
        least = np.inf
        found: list[Relaxation] = []
        for left_out in _subsets(list(self.late)):
            if self._out_of_time():
                return found
            relaxation = program.solve(without=left_out) if left_out else program.solve(all_in_use=True)
            if relaxation.bound_ms is not None:
                least = min(least, relaxation.bound_ms)
                if relaxation.bound_ms < self.best_value:
                    found.append(relaxation)
        self.bound = max(self.bound, min(least, self.best_value))
        return sorted(found, key=lambda relaxation: relaxation.bound_ms or 0.0)[:KIND_SETS]

    def _place_guided(self, program: LinearProgram, first: Relaxation, by_kinds: list[Relaxation]) -> None:
        """Options by the relaxation's shares, under ever looser limits on the largest shard, placed largest first."""
        assert first.bound_ms is not None
        relaxations = [first, *by_kinds]
        relaxations += [program.solve(limit * first.bound_ms) for limit in SHARD_LIMITS if not self._done()]
        guesses: dict[tuple[int, ...], Relaxation] = {}
        for relaxation in relaxations:
            if relaxation.bound_ms is not None:
                guesses.setdefault(tuple(int(shares.argmax()) for shares in relaxation.shares), relaxation)
        for weight in MEMORY_WEIGHTS:
            for choices, relaxation in guesses.items():
                self._place_largest_first(choices, relaxation, weight * first.bound_ms)
            if self.best is not None:
                return  # memory is saved only where it is short

    def _place_largest_first(self, choices: tuple[int, ...], relaxation: Relaxation, memory_weight: float) -> None:
        """Towards the relaxation's own maxima: while all are below them only evenness counts."""
        state = RankState(self.small, self.config.objective, memory_weight, relaxation.maxima_ms)
        for order in self._orders(choices):
            state.clear()
            if not self._out_of_time() and fill(state, list(choices), order):
                self._offer("relaxation", self._whole(state.assignment()))

    def _orders(self, choices: tuple[int, ...]) -> list[list[int]]:
        """Uniform options first, for they can only lie in one way; then the largest, by time and by memory."""
        tables = self.small.tables
        chosen = [options[choice] for options, choice in zip(tables, choices, strict=True)]
        room = np.maximum(self.small.capacity.min(axis=0), 1.0)
        free = [option.rule is not Rule.EVERY_RANK for option in chosen]
        by_time = [-float(option.cost_ms.sum(axis=1).max()) for option in chosen]
        by_memory = [-float((option.memory / room).max()) for option in chosen]
        return [sorted(range(len(chosen)), key=lambda table: (free[table], key[table])) for key in (by_time, by_memory)]

    def _narrow(self, relaxation: Relaxation) -> None:
        """Forget the options that no plan better than the best one can have, by the relaxation's prices."""
        if self.best is None or relaxation.bound_ms is None:
            return
        ceiling = self.best_value * (1 + 1e-6) - relaxation.bound_ms
        cheap = [{index for index, extra in enumerate(raises) if extra <= ceiling} for raises in relaxation.raises_ms]
        used = self._small(self.best).choices
        kept = [
            [index for position, index in enumerate(mine) if position in few or index == self.kept[table][used[table]]]
            for table, (mine, few) in enumerate(zip(self.worthwhile, cheap, strict=True))
        ]
        self.kept, self.small = kept, narrow(self.problem, kept)

    def _improve(self, relaxation: Relaxation) -> None:
        """Local search in rounds: what each finds rules more options out, and fewer are searched faster.

        Where few enough are left, the integer program answers at once; it also looks for a first plan where none is.
        """
        config = self.config
        for number, steps in enumerate(config.local_steps):
            self._climb(steps, config.seed + number)
            self._narrow(relaxation)
            if exact.count_variables(self.small) <= config.easy_variables:
                self._solve_exactly(config.exact_work)
            elif number == 0:
                self._solve_exactly(0)  # the root of the tree: seconds, and now and then it is all

    def _climb(self, steps: int, seed: int) -> None:
        if self.best is None or self._done():
            return
        state = RankState(self.small, self.config.objective)
        improved = improve(
            state, self._small(self.best), steps=steps, seed=seed, bound=self.bound, stop=self._out_of_time
        )
        self._offer("local search", self._whole(improved))

    def _small(self, whole: Assignment) -> Assignment:
        """The same by the options that are left: an option that was left out gives way to one as good."""
        choices = []
        for options, mine, choice in zip(self.problem.tables, self.kept, whole.choices, strict=True):
            if choice not in mine:
                choice = next(other for other in mine if dominates(options[other], options[choice], self.late))
            choices.append(mine.index(choice))
        return Assignment(choices, whole.ranks)

    def _whole(self, small: Assignment) -> Assignment:
        return Assignment([mine[choice] for mine, choice in zip(self.kept, small.choices, strict=True)], small.ranks)

    def _solve_exactly(self, work: int) -> None:
        size = exact.count_variables(self.small)
        if self._done() or size > self.config.exact_variables or (size, work) in self.tried:
            return
        self.tried.add((size, work))
        left = self.config.seconds - (time.monotonic() - self.started)
        found = exact.solve(
            self.small, self.config.objective, bound=self.bound, max_nodes=1 + work // size, seconds=left,
            cutoff=None if self.best is None else self.best_value,
        )  # fmt: skip
        self._out_of_time()
        self.bound = max(self.bound, found.bound_ms)
        if found.assignment is not None:
            self._offer("integer program", self._whole(found.assignment))
        elif self.best is None and found.finished:
            raise Infeasible(proven=True)


def _subsets(kinds: list[str]) -> Iterator[tuple[str, ...]]:
    for count in range(len(kinds) + 1):
        yield from itertools.combinations(kinds, count)
