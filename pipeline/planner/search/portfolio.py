"""Search with several methods, because none is best everywhere, and bound the distance to the
optimum.

TorchRec's proposals come first, so that the result is never worse. A linear program gives a lower
bound, and options are chosen by the shares in its solution. Local search and, for small problems,
an integer program continue from the best assignment. Steps, proposals and nodes are counted, so a
seed gives one result on any machine, unless `seconds` ends it early.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from pipeline.config.registry import from_extra
from pipeline.planner.search import exact
from pipeline.planner.search.annealing import MIN_GAP, Restarts
from pipeline.planner.search.incumbent import SLACK, Incumbent, Infeasible, SearchConfig, whole
from pipeline.planner.search.local_search import improve
from pipeline.planner.search.problem import Assignment, Floats, Rule, Score, SearchProblem, narrow, score
from pipeline.planner.search.proposals import try_proposals
from pipeline.planner.search.ranks import RankState, fill
from pipeline.planner.search.relaxation import Choice, LinearProgram, Mask, Relaxation
from pipeline.runtime.logs import progress

# in units of the bound: the weight of filling a rank's memory compared with time
MEMORY_WEIGHTS = (0.0, 0.3, 3.0, 10.0)
# the weight of large shards, because they are hard to spread
LUMP_WEIGHTS = (0.6, 0.8, 1.0, 1.25, 1.5, 3.0, 5.0)
SHARD_LIMITS = (0.6,)  # of each maximum; the limit of the largest shard
COST_CUTOFF = 1.25  # of the bound; more expensive choices are not worth their evenness
KIND_SETS = 8  # sets of kinds, the most promising, for which options are chosen
PROPOSALS_SHARE = 0.25  # of all seconds, at most for TorchRec's proposals
CHOICES_SHARE = 0.4  # of all seconds, after which the choices are placed
# those with the fewest placements first
PLACEMENT_KINDS = (Rule.EVERY_RANK, Rule.WHOLE_HOSTS, Rule.ONE_HOST, Rule.WITHIN_HOST, Rule.ANY_RANK)
GOOD_ENOUGH_RATIO = 1.04  # of the bound; if nothing better is found, memory may be the obstacle
# of all seconds, for the integer program of the complete problem before other methods
EASY_SHARE = 0.15
QUICK_SHARE = 0.05  # for an integer program that is not easy, after annealing has begun
# of the gap: what patterns of a rank are to prove, one after another
BOUND_STEPS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NUM_CLIMBED = 3  # the best starts, which are improved further


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Hold the result. `torchrec`: what TorchRec's planner would choose; complete: all its proposals were tried."""

    assignment: Assignment
    score: Score
    lower_bound_ms: float
    gap: float
    winner: str
    seconds: float
    cut_short: bool
    torchrec: Score | None
    torchrec_complete: bool
    values: dict[str, float] = field(default_factory=dict)  # best of each method, by the objective
    busy: float = 1.0  # wall seconds per CPU second of the search


def search(problem: SearchProblem, config: SearchConfig, warm_starts: Iterable[Assignment] = ()) -> SearchResult:
    """Return the best assignment within the config's limits, and a lower bound of any plan's cost.

    warm_starts: other planners' assignments, which are tried first. Raises Infeasible if no plan
    fits.
    """
    return _Search(problem, config).run(warm_starts)


class _Search:
    def __init__(self, problem: SearchProblem, config: SearchConfig) -> None:
        self.state = Incumbent(problem, config)
        self.restarts = Restarts(self.state)
        # sets of excluded kinds -> bound; empty: unknown
        self.bounds_by_kinds: dict[tuple[str, ...], float] = {}
        # sizes and work of integer programs: the same again would end the same
        self.tried: set[tuple[int, int, float]] = set()

    def run(self, warm_starts: Iterable[Assignment]) -> SearchResult:
        config = self.state.config
        with progress("searching a plan", 6) as bar:
            program = LinearProgram(self.state.small, config.objective)
            relaxation = program.solve()
            if relaxation.bound_ms is None:
                raise Infeasible(proven=True)
            self.state.bound = relaxation.bound_ms
            if program.crowd(relaxation):
                relaxation = program.solve()
                if relaxation.bound_ms is None:
                    raise Infeasible(proven=True)
                self.state.bound = relaxation.bound_ms
            for assignment in warm_starts:
                self.state.offer("warm start", assignment)
            # Only a share of the time, so that the other methods get time.
            had_its_share = partial(self.state.used, PROPOSALS_SHARE)
            torchrec = try_proposals(self.state.problem, config.objective, config.proposal_placements, had_its_share)
            if torchrec.best is not None:
                self.state.offer("torchrec", torchrec.best)
            bar.advance(1)
            choices = self._choose(program, relaxation, self._by_kinds(program, relaxation))
            cheapest, starts = self._place_over_capacity(choices), self._place_choices(choices)
            bar.advance(1)
            self._improve(relaxation, starts)
            bar.advance(1)
            self.restarts.improve_by_annealing(
                relaxation, cheapest, partial(self._solve_exactly, config.exact_work, QUICK_SHARE)
            )
            bar.advance(1)
            self._bound_by_patterns()
            bar.advance(1)
            self._solve_exactly(config.exact_work)
            bar.advance(1)
        if self.state.best is None:
            raise Infeasible(proven=False)
        value = score(self.state.problem, self.state.best)
        return SearchResult(
            assignment=self.state.best,
            score=value,
            lower_bound_ms=min(self.state.bound, value.of(config.objective)),
            gap=max(0.0, value.of(config.objective) / self.state.bound - 1) if self.state.bound > 0 else 0.0,
            winner=self.state.winner,
            seconds=self.state.clock.wall_s,
            busy=self.state.clock.busy,
            cut_short=self.state.cut_short,
            torchrec=None if torchrec.chosen is None else score(self.state.problem, torchrec.chosen),
            torchrec_complete=torchrec.complete,
            values=self.state.values,
        )

    def _by_kinds(self, program: LinearProgram, first: Relaxation) -> list[tuple[str, ...]]:
        """Return the sets of kinds to exclude from the plan; the most promising set is first.

        If kinds have a latency, every plan uses one set of kinds. So the smallest bound of all sets
        is a bound for all plans.
        """
        assert first.bound_ms is not None
        if (
            self.state.near_enough()
            or not self.state.late
            or self.state.small.num_options * 2 ** len(self.state.late) > self.state.config.kinds_work
        ):
            return [()]
        bounds: dict[tuple[str, ...], float] = {}
        kinds = list(self.state.late)
        counts = range(len(kinds) + 1)
        for left_out in itertools.chain.from_iterable(itertools.combinations(kinds, count) for count in counts):
            if self.state.used():
                return [()]
            relaxation = program.solve(without=left_out, all_in_use=True)
            if relaxation.bound_ms is not None:
                bounds[left_out] = relaxation.bound_ms
        self.state.bound = max(self.state.bound, min([*bounds.values(), self.state.best_value]))
        self.bounds_by_kinds = bounds
        promising = [left_out for left_out in bounds if bounds[left_out] < self.state.best_value]
        return sorted(promising, key=lambda left_out: bounds[left_out])[:KIND_SETS] or [()]

    def _choose(self, program: LinearProgram, first: Relaxation, sets: list[tuple[str, ...]]) -> list[Choice]:
        """Choose options for each set of kinds, then under tighter limits on the largest shard.

        Small shards can be spread evenly, and large shards cost less in total. Only placing the
        options shows which effect is stronger.
        """
        found: dict[tuple[int, ...], Choice] = {}

        def add(without: tuple[str, ...] = (), allowed: Mask | None = None, unevenness: Floats | None = None) -> None:
            if self.state.done() or (found and self.state.used(CHOICES_SHARE)):
                return
            remaining = self.state.clock.remaining_s
            choice = program.choose(
                allowed, nodes=self.state.config.choice_nodes, seconds=remaining, without=without, unevenness=unevenness
            )
            if choice is None:
                return
            if not without and allowed is None and unevenness is None:
                self.state.bound = max(self.state.bound, min(choice.bound_ms, self.state.best_value))
            if sum(choice.maxima_ms) < min(self.state.best_value, COST_CUTOFF * self.state.bound):
                found.setdefault(choice.choices, choice)

        add()
        maxima = next((choice.maxima_ms for choice in found.values()), first.maxima_ms)
        for without in sets:
            if without:
                add(without)
        for weight in LUMP_WEIGHTS:
            add(sets[0], unevenness=weight * program.lumps(maxima))
        for limit in SHARD_LIMITS:
            add(sets[0], program.small_shards(limit * maxima))
        return list(found.values())

    def _place_choices(self, choices: list[Choice]) -> list[Assignment]:
        """Return the best placement of each choice, the best first. Each round gives memory more weight."""
        best: dict[tuple[int, ...], Assignment] = {}
        for weight in MEMORY_WEIGHTS:
            before = min(map(self.state.value, best.values()), default=np.inf)
            for choice in choices:
                if best and self.state.done():
                    break
                found = self._place_largest_first(choice, weight * self.state.bound)
                known = best.get(choice.choices)
                if found is not None and (known is None or self.state.value(found) < self.state.value(known)):
                    best[choice.choices] = found
            after = min(map(self.state.value, best.values()), default=np.inf)
            if best and (after < self.state.bound * GOOD_ENOUGH_RATIO or after >= before):
                break
        return sorted(best.values(), key=self.state.value)

    def _place_largest_first(self, choice: Choice, memory_weight: float) -> Assignment | None:
        """Place tables so that loads stay below the relaxation's maxima, below which a load costs little."""
        state = RankState(
            self.state.small, self.state.config.objective, self.state.bound, memory_weight, choice.maxima_ms
        )
        found: list[Assignment] = []
        for order in self._orders(choice.choices):
            state.clear()
            if (not found or not self.state.used()) and fill(state, list(choice.choices), order):
                found.append(whole(self.state.kept, state.assignment()))
                self.state.offer("relaxation", found[-1])
        return min(found, key=self.state.value) if found else None

    def _orders(self, choices: tuple[int, ...]) -> list[list[int]]:
        """Return orders of tables by time and by memory: options with few possible placements
        first, then large ones.
        """
        tables = self.state.small.tables
        chosen = [options[choice] for options, choice in zip(tables, choices, strict=True)]
        room = np.maximum(self.state.small.capacity.min(axis=0), 1.0)
        free = [PLACEMENT_KINDS.index(option.rule) for option in chosen]
        by_time = [-float(option.cost_ms.sum(axis=1).max()) for option in chosen]
        by_memory = [-float((option.memory / room).max()) for option in chosen]
        return [sorted(range(len(chosen)), key=lambda table: (free[table], key[table])) for key in (by_time, by_memory)]

    def _improve(self, relaxation: Relaxation, starts: list[Assignment]) -> None:
        """Run local search in rounds. Each result excludes options, so the next round is faster.

        If few options are left, the integer program solves the rest. The integer program also
        searches for a first plan.
        """
        config = self.state.config
        if (best := self._best_beyond(starts)) is not None:
            starts = [*starts, best]
        climbed = [self._climb(start, relaxation, config.start_steps, config.seed) for start in starts]
        self.state.narrow(relaxation)
        # the root of the tree: takes seconds, and sometimes solves the problem
        self._solve_exactly(0)
        climbed = sorted(climbed, key=self.state.value)[:NUM_CLIMBED]
        for number, steps in enumerate(config.local_steps[: 1 if self.state.has_patterns else None]):
            if exact.count_variables(self.state.small) <= config.easy_variables:
                self._solve_exactly(config.exact_work, EASY_SHARE)
            if (best := self._best_beyond(climbed)) is not None:
                climbed = [best, *climbed[:-1]]
            each = steps // max(1, len(climbed))
            climbed = [self._climb(start, relaxation, each, config.seed + number) for start in climbed]
            climbed = sorted(climbed, key=self.state.value)[: max(1, NUM_CLIMBED - 1 - number)]
            self.state.narrow(relaxation)

    def _best_beyond(self, starts: list[Assignment]) -> Assignment | None:
        """Return the best assignment, or None if one of `starts` is as good."""
        is_there = any(self.state.value(start) <= self.state.best_value for start in starts)
        return None if is_there else self.state.best

    def _climb(self, start: Assignment, relaxation: Relaxation, steps: int, seed: int) -> Assignment:
        """Improve `start` by local search with the options that are cheap enough."""
        if self.state.done():
            return start
        kept = self.state.worth(relaxation, SLACK, start)
        small = Assignment(self.state.within(kept, start), start.ranks)
        state = RankState(narrow(self.state.problem, kept), self.state.config.objective, self.state.best_value)
        found = improve(
            state,
            small,
            steps=steps,
            seed=seed,
            bound=self.state.bound,
            stop=self.state.used,
            tolerance=self.state.config.gap_tolerance,
        )
        improved = whole(kept, found)
        self.state.offer("local search", improved)
        return improved

    def _place_over_capacity(self, choices: list[Choice]) -> Assignment | None:
        """Place the cheapest choice even if ranks become overfull. Return None if no placement follows the rules."""
        if not choices:
            return None
        choice = choices[0]
        endless = replace(self.state.small, capacity=np.full_like(self.state.small.capacity, np.inf), host_memory=None)
        state = RankState(endless, self.state.config.objective, self.state.bound, targets=choice.maxima_ms)
        filled = fill(state, list(choice.choices), self._orders(choice.choices)[0])
        return whole(self.state.kept, state.assignment()) if filled else None

    def _bound_by_patterns(self) -> None:
        """Raise the bound step by step towards the cost of the best plan, if few options are left."""
        state, lowest = self.state, self.state.bound
        is_near = state.best_value <= lowest * (1 + MIN_GAP)
        if is_near or state.best is None or not state.has_patterns or (state.late and not self.bounds_by_kinds):
            return
        known = self.bounds_by_kinds or {(): lowest}
        proves = from_extra("prove_bounds", "a bound by patterns")(
            state.small, state.config.objective, list(known), state.config.bound_patterns, state.used
        )
        for share in BOUND_STEPS:
            cutoff = lowest + share * (state.best_value - lowest)
            if not all(known[left_out] >= cutoff or proves(left_out, cutoff) for left_out in known):
                return
            state.bound = max(state.bound, cutoff)

    def _solve_exactly(self, work: int, share: float = 1.0) -> None:
        """Solve the integer program within `share` of all seconds. A later attempt may continue it."""
        size = exact.count_variables(self.state.small)
        if self.state.done() or size > self.state.config.exact_variables or (size, work, share) in self.tried:
            return
        self.tried.add((size, work, share))
        remaining = min(self.state.clock.remaining_s, share * self.state.config.seconds * self.state.clock.busy)
        found = exact.solve(
            self.state.small, self.state.config.objective, bound=self.state.bound, max_nodes=1 + work // size, seconds=remaining,
            tolerance=self.state.config.gap_tolerance, cutoff=None if self.state.best is None else self.state.best_value,
        )  # fmt: skip
        self.state.used()
        self.state.bound = max(self.state.bound, found.bound_ms)
        if found.assignment is not None:
            self.state.offer("integer program", whole(self.state.kept, found.assignment))
        elif self.state.best is None and found.finished:
            raise Infeasible(proven=True)
