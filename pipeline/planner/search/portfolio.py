"""Search with several methods, none of which wins everywhere, and bound how far from the best possible the result can be.

TorchRec's own proposals come first, so that nothing worse comes out; a linear program bounds from below and its
shares choose options; local search and, where small enough, an integer program go on from the best.
Steps, proposals and nodes are counted, so a seed gives one result on any machine, unless `seconds` cuts it short.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pipeline.planner.search import exact
from pipeline.planner.search.annealing import EVEN_LOADS, FULL_RANKS, Schedule, can_anneal, improve_by_annealing
from pipeline.planner.search.clock import WorkClock
from pipeline.planner.search.local_search import PROVEN, improve
from pipeline.planner.search.neighbourhoods import improve_by_programs
from pipeline.planner.search.problem import (
    Assignment,
    Floats,
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
from pipeline.planner.search.relaxation import Choice, LinearProgram, Mask, Relaxation
from pipeline.runtime.logs import progress

MEMORY_WEIGHTS = (0.0, 0.3, 3.0, 10.0)  # in units of the bound: what filling a rank's memory counts beside time
LUMPS = (0.6, 0.8, 1.0, 1.25, 1.5, 3.0, 5.0)  # what it counts that large shards are hard to spread
SHARD_LIMITS = (0.6,)  # of each maximum; what the largest shard may take
DEAR = 1.25  # of the bound: choices that cost more cannot be worth their evenness
KIND_SETS = 8  # sets of kinds, the most promising, that options are chosen by
PROPOSALS_SHARE = 0.25  # of all seconds, for the walk over TorchRec's proposals at most
CHOICES_SHARE = 0.4  # of all seconds, from when on what was chosen is placed
HOPE = 0.3  # of the gap: what an option may cost beside the cheapest for local search to try it
WAYS = (Rule.EVERY_RANK, Rule.WHOLE_HOSTS, Rule.ONE_HOST, Rule.WITHIN_HOST, Rule.ANY_RANK)  # to lie, fewest first
WELL_PLACED = 1.04  # of the bound: where nothing better is found, memory may stand in the way
EASY_SHARE = 0.15  # of all seconds, for the integer program of the whole problem before other methods had their turn
NUM_CLIMBED = 3  # starts, the best, that are improved further
WORTH_PROGRAMS = 0.02  # a gap from which on programs over a few ranks are tried
PROGRAMS_ANYHOW = 3  # times that they begin from a choice that does not fit, each by another seed, until one fits
MOVES_EACH = 60_000  # of annealing, for each table and rank; twice as many for even loads after a time in vain
MANY_RANKS = 64  # from here on a table that goes to every rank takes so long that fewer moves are made
ANNEALINGS = 8  # times that annealing begins at most
ENOUGH_IN_VAIN = 3  # of them in a row: then it ends; one where the integer program of the whole problem is easy and memory is not scarce
ANNEALED_SHARE = 0.9  # of all seconds, until when
LEAST_GAIN = 1e-4  # of the value: less counts as in vain
ANYHOW_SHARE = 0.6  # of the seconds that are left, for those


@dataclass(frozen=True)
class SearchConfig:
    """`seconds`, of CPU, is an outer stop (see WorkClock); all else counts work, the same on every machine.

    The search ends once the gap is `gap_tolerance` at most, but not before TorchRec's proposals were tried.
    """

    objective: str = "critical_path"
    seed: int = 0
    seconds: float = 60.0
    gap_tolerance: float = PROVEN
    proposal_placements: int = 300_000  # of shards, in TorchRec's proposals
    kinds_work: int = 100_000  # options times sets of kinds with a latency: beyond it one relaxation stands for all
    start_steps: int = 200  # of local search from each start
    local_steps: tuple[int, ...] = (3000, 4000, 6000)
    anneal_moves: int = 40_000_000  # at most, each time that annealing begins
    program_rounds: int = 250  # of integer programs over a few ranks, from each start
    choice_nodes: int = 300  # of the integer program that chooses options
    easy_variables: int = 1200  # of an integer program that is mostly solved in seconds
    exact_variables: int = 8000  # a larger one is not tried
    exact_work: int = 1_500_000  # nodes times variables


# Whether there is a plan at all, and little else.
FIRST_PLAN = SearchConfig(
    objective="max_rank", proposal_placements=20_000, start_steps=0, local_steps=(), anneal_moves=0,
    program_rounds=0,     exact_variables=3000, exact_work=100_000,
)  # fmt: skip


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
    busy: float = 1.0  # seconds of the clock for each CPU second of the search


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
        self.clock = WorkClock(config.seconds)
        self.cut_short = False
        self.best: Assignment | None = None
        self.best_value = np.inf
        self.winner = ""
        self.annealed = config.anneal_moves > 0 and can_anneal()
        self.values: dict[str, float] = {}
        self.bound = 0.0
        self.tried: set[tuple[int, int, float]] = (
            set()
        )  # sizes and work of integer programs: the same again would end the same
        self.late = problem.kind_ms
        self.worthwhile = worth_trying(problem)
        if not all(self.worthwhile):
            raise Infeasible(proven=True)
        self.kept = self.worthwhile
        self.small = narrow(problem, self.kept)
        self.twins = [group for group in exact.equal_tables(problem) if len(group) > 1]

    def run(self, warm_starts: Iterable[Assignment]) -> SearchResult:
        config = self.config
        with progress("searching a plan", 6) as bar:
            program = LinearProgram(self.small, config.objective)
            relaxation = program.solve()
            if relaxation.bound_ms is None:
                raise Infeasible(proven=True)
            self.bound = relaxation.bound_ms
            for assignment in warm_starts:
                self._offer("warm start", assignment)
            torchrec = try_proposals(self.problem, config.objective, config.proposal_placements, self._had_its_share)
            if torchrec.best is not None:
                self._offer("torchrec", torchrec.best)
            bar.advance(1)
            choices = self._choose(program, relaxation, self._by_kinds(program, relaxation))
            anyhow, starts = self._place_anyhow(choices), self._place_choices(choices)
            bar.advance(1)
            self._improve(relaxation, starts)
            bar.advance(1)
            self._improve_by_annealing(relaxation, anyhow)
            bar.advance(1)
            self._improve_by_programs(anyhow)
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
            seconds=self.clock.wall_s,
            busy=self.clock.busy,
            cut_short=self.cut_short,
            torchrec=None if torchrec.chosen is None else score(self.problem, torchrec.chosen),
            torchrec_complete=torchrec.complete,
            values=self.values,
        )

    def _out_of_time(self) -> bool:
        late = self.clock.has_used()
        self.cut_short = self.cut_short or late
        return late

    def _had_its_share(self) -> bool:
        """Time for the walk over proposals: all else must come to something too."""
        return self._used(PROPOSALS_SHARE)

    def _used(self, share: float) -> bool:
        late = self.clock.has_used(share)
        self.cut_short = self.cut_short or late
        return late

    def _done(self) -> bool:
        return self._near_enough() or self._out_of_time()

    def _near_enough(self) -> bool:
        return self.best_value <= self.bound * (1 + max(PROVEN, self.config.gap_tolerance))

    def _offer(self, member: str, assignment: Assignment) -> None:
        """Keep an assignment of the whole problem if it is valid and the best so far."""
        if violations(self.problem, assignment):
            return
        value = score(self.problem, assignment).of(self.config.objective)
        self.values[member] = min(value, self.values.get(member, np.inf))
        if value < self.best_value:
            self.best, self.best_value, self.winner = assignment, value, member

    def _by_kinds(self, program: LinearProgram, first: Relaxation) -> list[tuple[str, ...]]:
        """Sets of kinds to leave out, most promising first: where kinds have a latency, a plan uses one set of them.

        So the least of their bounds bounds all plans.
        """
        assert first.bound_ms is not None
        if (
            self._near_enough()
            or not self.late
            or self.small.num_options * 2 ** len(self.late) > self.config.kinds_work
        ):
            return [()]
        bounds: dict[tuple[str, ...], float] = {}
        for left_out in _subsets(list(self.late)):
            if self._out_of_time():
                return [()]
            relaxation = program.solve(without=left_out, all_in_use=True)
            if relaxation.bound_ms is not None:
                bounds[left_out] = relaxation.bound_ms
        self.bound = max(self.bound, min([*bounds.values(), self.best_value]))
        promising = [left_out for left_out in bounds if bounds[left_out] < self.best_value]
        return sorted(promising, key=lambda left_out: bounds[left_out])[:KIND_SETS] or [()]

    def _choose(self, program: LinearProgram, first: Relaxation, sets: list[tuple[str, ...]]) -> list[Choice]:
        """Options chosen whole for each set of kinds, then under ever tighter limits on the largest shard.

        Small shards can be spread evenly, large ones cost less in all: which weighs more shows when they are placed.
        """
        found: dict[tuple[int, ...], Choice] = {}

        def add(without: tuple[str, ...] = (), allowed: Mask | None = None, unevenness: Floats | None = None) -> None:
            if self._done() or (found and self._used(CHOICES_SHARE)):
                return
            remaining = self.clock.remaining_s
            choice = program.choose(
                allowed, nodes=self.config.choice_nodes, seconds=remaining, without=without, unevenness=unevenness
            )
            if choice is None:
                return
            if not without and allowed is None and unevenness is None:
                self.bound = max(self.bound, min(choice.bound_ms, self.best_value))
            if sum(choice.maxima_ms) < min(self.best_value, DEAR * self.bound):
                found.setdefault(choice.choices, choice)

        add()
        maxima = next((choice.maxima_ms for choice in found.values()), first.maxima_ms)
        for without in sets:
            if without:
                add(without)
        for weight in LUMPS:
            add(sets[0], unevenness=weight * program.lumps(maxima))
        for limit in SHARD_LIMITS:
            add(sets[0], program.small_shards(limit * maxima))
        return list(found.values())

    def _place_choices(self, choices: list[Choice]) -> list[Assignment]:
        """The best placement of each choice, the best one first; memory is saved only as long as that helps."""
        best: dict[tuple[int, ...], Assignment] = {}
        for weight in MEMORY_WEIGHTS:
            before = min(map(self._value, best.values()), default=np.inf)
            for choice in choices:
                if best and self._done():
                    break
                found = self._place_largest_first(choice, weight * self.bound)
                known = best.get(choice.choices)
                if found is not None and (known is None or self._value(found) < self._value(known)):
                    best[choice.choices] = found
            after = min(map(self._value, best.values()), default=np.inf)
            if best and (after < self.bound * WELL_PLACED or after >= before):
                break
        return sorted(best.values(), key=self._value)

    def _place_largest_first(self, choice: Choice, memory_weight: float) -> Assignment | None:
        """Towards the relaxation's own maxima: while all are below them a load costs little."""
        state = RankState(self.small, self.config.objective, self.bound, memory_weight, choice.maxima_ms)
        found: list[Assignment] = []
        for order in self._orders(choice.choices):
            state.clear()
            if (not found or not self._out_of_time()) and fill(state, list(choice.choices), order):
                found.append(self._whole(state.assignment()))
                self._offer("relaxation", found[-1])
        return min(found, key=self._value) if found else None

    def _value(self, assignment: Assignment) -> float:
        return score(self.problem, assignment).of(self.config.objective)

    def _orders(self, choices: tuple[int, ...]) -> list[list[int]]:
        """Options that can lie in fewer ways first; then the largest, by time and by memory."""
        tables = self.small.tables
        chosen = [options[choice] for options, choice in zip(tables, choices, strict=True)]
        room = np.maximum(self.small.capacity.min(axis=0), 1.0)
        free = [WAYS.index(option.rule) for option in chosen]
        by_time = [-float(option.cost_ms.sum(axis=1).max()) for option in chosen]
        by_memory = [-float((option.memory / room).max()) for option in chosen]
        return [sorted(range(len(chosen)), key=lambda table: (free[table], key[table])) for key in (by_time, by_memory)]

    def _worth(self, relaxation: Relaxation, share: float, using: Assignment) -> list[list[int]]:
        """Options that by the relaxation's prices cost no more than a share of the gap, and those in use."""
        assert relaxation.bound_ms is not None
        ceiling = max(0.0, self.best_value * (1 + 1e-6) - relaxation.bound_ms) * share
        used = [
            indices[choice]
            for indices, choice in zip(self.worthwhile, self._within(self.worthwhile, using), strict=True)
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

    def _narrow(self, relaxation: Relaxation) -> None:
        """Forget the options that no plan better than the best one can have."""
        if self.best is not None and relaxation.bound_ms is not None:
            self.kept = self._worth(relaxation, 1.0, self.best)
            self.small = narrow(self.problem, self.kept)

    def _improve(self, relaxation: Relaxation, starts: list[Assignment]) -> None:
        """Local search in rounds: what each finds rules more options out, and fewer are searched faster.

        Where few enough are left, the integer program answers at once; it also looks for a first plan where none is.
        """
        config = self.config
        if self.best is not None and not any(self._value(start) <= self.best_value for start in starts):
            starts = [*starts, self.best]
        climbed = [self._climb(start, relaxation, config.start_steps, config.seed) for start in starts]
        self._narrow(relaxation)
        self._solve_exactly(0)  # the root of the tree: seconds, and now and then it is all
        climbed = sorted(climbed, key=self._value)[:NUM_CLIMBED]
        for number, steps in enumerate(config.local_steps):
            if exact.count_variables(self.small) <= config.easy_variables:
                self._solve_exactly(config.exact_work, EASY_SHARE)
            if self.best is not None and not any(self._value(start) <= self.best_value for start in climbed):
                climbed = [self.best, *climbed[:-1]]
            each = steps // max(1, len(climbed))
            climbed = [self._climb(start, relaxation, each, config.seed + number) for start in climbed]
            climbed = sorted(climbed, key=self._value)[: max(1, NUM_CLIMBED - 1 - number)]
            self._narrow(relaxation)

    def _climb(self, start: Assignment, relaxation: Relaxation, steps: int, seed: int) -> Assignment:
        """By the options that are cheap enough to hope for."""
        if self._done():
            return start
        kept = self._worth(relaxation, HOPE, start)
        small = Assignment(self._within(kept, start), start.ranks)
        state = RankState(narrow(self.problem, kept), self.config.objective, self.best_value)
        found = improve(
            state,
            small,
            steps=steps,
            seed=seed,
            bound=self.bound,
            stop=self._out_of_time,
            tolerance=self.config.gap_tolerance,
        )
        choices = [indices[choice] for indices, choice in zip(kept, found.choices, strict=True)]
        improved = Assignment(choices, found.ranks)
        self._offer("local search", improved)
        return improved

    def _improve_by_annealing(self, relaxation: Relaxation, anyhow: Assignment | None) -> None:
        """From the best plan, or the cheapest choice where none fits yet; left out where the gap is small, for it takes seconds.

        Where that choice overfills ranks, every other time begins from it, hot, with its kinds alone. Of the other times half try kinds in use alone.
        """
        overfull = anyhow is not None and bool(violations(self.problem, anyhow))
        is_easy = self.best is not None and exact.count_variables(self.small) <= self.config.easy_variables
        in_vain, enough = 0, 1 if is_easy and not overfull else ENOUGH_IN_VAIN
        for attempt in range(ANNEALINGS if self.annealed else 0):
            hot = overfull and attempt % 2 == 0
            start = anyhow if hot or self.best is None else self.best
            if start is None or in_vain == enough or self._is_near():
                return
            before = self.best_value
            if hot:
                self._anneal(start, relaxation, FULL_RANKS, attempt, self._num_moves())
            else:
                self._anneal(start, relaxation, EVEN_LOADS, attempt, self._num_moves() * 2**in_vain)
            in_vain = 0 if self.best_value < before * (1 - LEAST_GAIN) else in_vain + 1

    def _num_moves(self) -> int:
        world = self.problem.world_size
        moves = min(self.config.anneal_moves, MOVES_EACH * len(self.problem.tables) * world)
        return int(moves * min(1.0, MANY_RANKS / world))

    def _anneal(self, start: Assignment, relaxation: Relaxation, schedule: Schedule, attempt: int, moves: int) -> None:
        config = self.config
        kept = self._worth(relaxation, 1.0 if schedule is FULL_RANKS else HOPE, start)
        if schedule is FULL_RANKS or attempt % 4 >= 2:
            kept = self._of_kinds_in_use(kept, start)
        found = improve_by_annealing(
            narrow(self.problem, kept),
            Assignment(self._within(kept, start), start.ranks),
            config.objective,
            schedule=schedule,
            moves=moves,
            seed=config.seed + attempt,
            scale_ms=min(self.best_value, 2 * self.bound),
            stop=partial(self._used, ANNEALED_SHARE),
        )
        if found is not None:
            choices = [indices[choice] for indices, choice in zip(kept, found.choices, strict=True)]
            self._offer("annealing", Assignment(choices, found.ranks))

    def _is_near(self) -> bool:
        return self._done() or self.best_value <= self.bound * (1 + WORTH_PROGRAMS)

    def _of_kinds_in_use(self, kept: list[list[int]], using: Assignment) -> list[list[int]]:
        """Of the options `kept` those whose kind has no latency, or that other tables bring anyway."""
        used = {options[choice].kind for options, choice in zip(self.problem.tables, using.choices, strict=True)}
        return [
            [index for index in indices if options[index].kind in used or options[index].kind not in self.late]
            for options, indices in zip(self.problem.tables, kept, strict=True)
        ]

    def _improve_by_programs(self, anyhow: Assignment | None) -> None:
        """From the cheapest choice, even if it overfills ranks, then from the best plan: what exchanges of two shards cannot do.

        Where the gap is small the programs are left out, for they take seconds.
        """
        if not self.config.program_rounds or self._is_near() or (self.annealed and self.best is not None):
            return
        reserved = (1 - ANYHOW_SHARE) * self.clock.remaining_s
        overfull = anyhow is not None and bool(violations(self.problem, anyhow))
        for attempt in range(PROGRAMS_ANYHOW if overfull else 0):
            if anyhow is None or self._done() or self._run_programs(anyhow, attempt, reserved):
                break
        if self.best is not None and not self._done():
            self._run_programs(self.best, PROGRAMS_ANYHOW, 0.0)

    def _run_programs(self, start: Assignment, attempt: int, reserved_s: float) -> bool:
        """Whether they found a plan that fits."""
        config, small = self.config, narrow(self.problem, self.worthwhile)
        found = improve_by_programs(
            RankState(small, config.objective, min(self.best_value, 2 * self.bound)),
            Assignment(self._within(self.worthwhile, start), start.ranks),
            rounds=config.program_rounds,
            seed=config.seed + attempt,
            enough=self.bound * (1 + max(PROVEN, config.gap_tolerance)),
            remaining_s=partial(self._remaining_beyond, reserved_s),
        )
        if found is not None:
            choices = [indices[choice] for indices, choice in zip(self.worthwhile, found.choices, strict=True)]
            self._offer("programs", Assignment(choices, found.ranks))
        return found is not None

    def _remaining_beyond(self, reserved_s: float) -> float:
        return 0.0 if self._out_of_time() else self.clock.remaining_s - reserved_s

    def _place_anyhow(self, choices: list[Choice]) -> Assignment | None:
        """The first choice, the cheapest, its loads even, whatever that overfills; None where a rule cannot be kept."""
        if not choices:
            return None
        choice = choices[0]
        endless = replace(self.small, capacity=np.full_like(self.small.capacity, np.inf), host_memory=None)
        state = RankState(endless, self.config.objective, self.bound, targets=choice.maxima_ms)
        filled = fill(state, list(choice.choices), self._orders(choice.choices)[0])
        return self._whole(state.assignment()) if filled else None

    def _within(self, kept: list[list[int]], whole: Assignment) -> list[int]:
        """The choices among options `kept`: one that was left out gives way to one as good."""
        choices = []
        for options, indices, choice in zip(self.problem.tables, kept, whole.choices, strict=True):
            if choice not in indices:
                choice = next(other for other in indices if dominates(options[other], options[choice], self.late))
            choices.append(indices.index(choice))
        return choices

    def _whole(self, small: Assignment) -> Assignment:
        return Assignment(
            [indices[choice] for indices, choice in zip(self.kept, small.choices, strict=True)], small.ranks
        )

    def _solve_exactly(self, work: int, share: float = 1.0) -> None:
        """`share` of all seconds at most: then the same program may be tried once more, with all that are left."""
        size = exact.count_variables(self.small)
        if self._done() or size > self.config.exact_variables or (size, work, share) in self.tried:
            return
        self.tried.add((size, work, share))
        remaining = min(self.clock.remaining_s, share * self.config.seconds * self.clock.busy)
        found = exact.solve(
            self.small, self.config.objective, bound=self.bound, max_nodes=1 + work // size, seconds=remaining,
            tolerance=self.config.gap_tolerance, cutoff=None if self.best is None else self.best_value,
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
