"""Start annealing several times: from the best plan, or from the cheapest choice of options, which
may overfill ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pipeline.planner.search import exact
from pipeline.planner.search.annealing import (
    COOL,
    EVEN_LOADS,
    FULL_RANKS,
    MANY_RANKS,
    Schedule,
    can_anneal,
    improve_by_annealing,
)
from pipeline.planner.search.incumbent import SLACK, Incumbent
from pipeline.planner.search.problem import (
    Assignment,
    narrow,
    violations,
)
from pipeline.planner.search.relaxation import Relaxation

MIN_GAP = 0.02  # smaller gaps are not worth annealing's time
# of annealing, per table and rank; twice as many for even loads after a failed attempt
MOVES_EACH = 60_000
ALL_MOVES = 128  # ranks; with more, a table on every rank takes so long that fewer moves are made
ANNEALINGS = 8  # maximum number of annealings
# failed attempts in a row, after which it ends; one if the integer program is easy and memory is
# not scarce
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

        Skip it if the gap is small.

        `solve` is called after the first attempt: its plan may be proven optimal, which makes later
        attempts useless. If the cheapest choice overfills ranks, every other attempt starts from
        it, hot, with only its kinds. Half of the remaining attempts use only kinds in use. The
        first attempt is hot, unless most tables are equal.
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
            choices = [indices[choice] for indices, choice in zip(kept, found.choices, strict=True)]
            self.state.offer("annealing", Assignment(choices, found.ranks))

    def _is_near(self) -> bool:
        return self.state.done() or self.state.best_value <= self.state.bound * (1 + MIN_GAP)

    def _of_kinds_in_use(self, kept: list[list[int]], using: Assignment) -> list[list[int]]:
        """Return the options of `kept` whose kind has no latency or is used by other tables."""
        used = {options[choice].kind for options, choice in zip(self.state.problem.tables, using.choices, strict=True)}
        return [
            [index for index in indices if options[index].kind in used or options[index].kind not in self.state.late]
            for options, indices in zip(self.state.problem.tables, kept, strict=True)
        ]
