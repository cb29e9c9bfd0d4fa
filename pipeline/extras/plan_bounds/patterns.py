"""Prove a lower bound of the cost of any plan from what a single rank can hold, by column
generation over patterns.

A pattern states how many shards of each option one rank holds. A pattern must fit the rank's
memory. Within a box (limits of the maxima over ranks), it must also keep the box's upper limits. A
linear program combines patterns so that they hold all tables, and a knapsack search finds the
pattern with the highest value at the program's prices. Boxes are split as in branch and bound:
within narrow limits the bound shows that shards do not fill a rank evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import scipy  # its parts load on first use: the linear programs take a third of a second
from numpy.typing import NDArray

from pipeline.planner.search.exact import equal_tables
from pipeline.planner.search.problem import Floats, Option, Ranks, Rule, SearchProblem
from pipeline.planner.search.ranks import project
from pipeline.planner.search.relaxation import BYTES_SCALE, SAFE

PRICED = 1 + 1e-3  # factor of the value by which a better pattern may be missed
EQUAL_TABLES = 4  # minimum mean number of tables per group
NODES = 3_000_000  # of branch and bound, to find one pattern
PATTERNS_EACH = 100  # searched in a box at most; then the box is split
MISSING = 10.0  # of the cutoff: the price if no pattern holds a table
CLEARLY_BELOW = 0.999  # of the cutoff: a box with a smaller value is split
TIGHTENED = 5  # times that a box is solved again within narrower limits
SHRUNK = 0.05  # of a box's width; a smaller change is not worth solving it again
NARROWEST = 1e-6  # of the cutoff: narrower boxes are not split
MERGED = 1e-8  # relative; maxima that differ by a constant factor only are merged
Mask = NDArray[np.bool_]


@dataclass
class Work:
    """The number of patterns that may still be searched; `stop` ends it earlier."""

    patterns: int
    stop: Callable[[], bool]

    def is_done(self) -> bool:
        return self.patterns <= 0 or self.stop()


@dataclass(frozen=True, eq=False)
class Box:
    """Hold the lower and the upper limits [P] of the maxima over ranks."""

    low: Floats
    high: Floats


@dataclass(frozen=True, eq=False)
class _Solved:
    """Hold the solution of a box's linear program.

    The fields are the value, the part of the value for tables that no pattern holds, the prices of
    shards [O], the price of a pattern, the maxima [P], and the increase of the value per
    millisecond of each maximum [P].
    """

    value: float
    missing: float
    prices: Floats
    pattern_price: float
    maxima: Floats
    raises: Floats


@dataclass(frozen=True, eq=False)
class _Bounded:
    """Hold the lower bound of a box, and the maxima and their prices in the linear program that proves the bound."""

    bound: float
    maxima: Floats
    raises: Floats


UNKNOWN = _Bounded(-np.inf, np.zeros(0), np.zeros(0))


def can_bound(problem: SearchProblem, most_options: int) -> bool:
    """Return whether Numba is installed and the problem has few options and many equal tables.

    With more options or fewer equal tables there are too many patterns to compute a bound.
    """
    groups = equal_tables(problem)
    options = sum(len(problem.tables[group[0]]) for group in groups)
    is_small = options <= most_options and len(groups) * EQUAL_TABLES <= len(problem.tables)
    return is_small and find_spec("numba") is not None


class PatternBound:
    """Bound a problem from which the kinds `left_out` are excluded. O options of G groups of equal
    tables, P maxima, K resources of a rank.

    The resources are the maxima and the kinds of memory. All kinds that are not left out count as
    in use.
    """

    def __init__(self, problem: SearchProblem, objective: str, left_out: Collection[str] = ()) -> None:
        groups = equal_tables(problem)
        grouped = [
            (number, option)
            for number, tables in enumerate(groups)
            for option in problem.tables[tables[0]]
            if option.kind not in left_out
        ]
        # a table has no option left
        self.is_impossible = len({number for number, _ in grouped}) < len(groups)
        if self.is_impossible:
            return
        options = [option for _, option in grouped]
        costs = [project(option, objective) for option in options]
        self.ranks = problem.world_size
        self.latency = sum(late for kind, late in problem.kind_ms.items() if kind not in left_out)
        self.copies = np.array([len(tables) for tables in groups], dtype=float)  # [G]
        self.group = np.array([number for number, _ in grouped])  # [O]
        self.most = np.array([_most_on_a_rank(problem, option) for option in options], dtype=float)
        self.shards = self.copies[self.group] * [option.num_shards for option in options]  # [O] of all tables
        largest, total = np.array([cost.max(axis=0) for cost in costs]), np.array([cost.sum(axis=0) for cost in costs])
        least = np.array([cost.min(axis=0) for cost in costs])
        kept, self.weights = _merge(np.concatenate([least, total, largest]))
        self.cost, self.total, self.largest = least[:, kept], total[:, kept], largest[:, kept]
        self.memory = np.array([option.memory.min(axis=0) for option in options]) / BYTES_SCALE
        self.room = problem.capacity.max(axis=0) / BYTES_SCALE
        self.taken = (
            np.array([option.memory.sum(axis=0) for option in options]) / BYTES_SCALE * self.copies[self.group, None]
        )
        self.all_room = problem.capacity.sum(axis=0) / BYTES_SCALE
        self.patterns: list[Floats] = [np.zeros(len(options))]
        self.fixed, self.one_each = self._rows()

    def proves(self, cutoff: float, work: Work) -> bool:
        """Return whether every plan is proven to cost at least `cutoff`."""
        goal = cutoff * (1 + 2 * SAFE)
        if self.is_impossible or goal <= self.latency:
            return True
        count = len(self.weights)
        boxes = [Box(np.zeros(count), (goal - self.latency) / self.weights)]
        while boxes:
            if work.is_done():
                return False
            parts = self._bound_box(boxes.pop(), goal, work)
            if parts is None:
                return False
            boxes += parts
        return True

    def _bound_box(self, box: Box, goal: float, work: Work) -> list[Box] | None:
        """Return the parts into which a box is split; none if it costs at least `goal`; None if it
        cannot be split further.
        """
        tight = self._tighten(box, goal)
        for _ in range(TIGHTENED):
            if tight is None:
                return []
            box = tight
            found = self._generate(box, goal, work)
            if found.bound >= goal:
                return []
            if not np.isfinite(found.bound):
                break
            gain = np.where(found.raises > 1e-9, (goal - found.bound) / np.maximum(found.raises, 1e-9), np.inf)
            high = np.minimum(box.high, box.low + gain)
            if not (box.high - high > SHRUNK * (box.high - box.low)).any():
                break
            tight = Box(box.low, high)
        widths = (box.high - box.low) * self.weights
        widest = int(np.argmax(widths))
        if widths[widest] < NARROWEST * goal:
            return None
        middle = (box.low[widest] + box.high[widest]) / 2
        lower, upper = box.high.copy(), box.low.copy()
        lower[widest] = upper[widest] = middle
        return [Box(box.low, lower), Box(upper, box.high)]

    def _generate(self, box: Box, goal: float, work: Work) -> _Bounded:
        """Add patterns until the box costs at least `goal`, or clearly less than `goal`, or no pattern improves it."""
        usable = [pattern for pattern in self.patterns if (pattern @ self.cost <= box.high * (1 + 1e-9)).all()]
        best = UNKNOWN
        for _ in range(PATTERNS_EACH):
            if work.is_done():
                break
            solved = self._solve(usable, box, goal)
            if solved is None:
                return best
            if not np.isfinite(solved.value):
                return _Bounded(np.inf, box.low, np.zeros_like(box.low))
            work.patterns -= 1
            base = max(0.0, -solved.pattern_price)
            pattern, worth = self._find_pattern(solved.prices, box.high, base)
            bound = solved.value - self.ranks * max(0.0, worth + solved.pattern_price)
            if bound > best.bound:
                best = _Bounded(bound, solved.maxima, solved.raises)
            is_below = solved.missing < 1e-9 and solved.value < goal * CLEARLY_BELOW
            if best.bound >= goal or is_below or pattern is None:
                return best
            usable.append(pattern)
            self.patterns.append(pattern)
        return best

    def _solve(self, patterns: list[Floats], box: Box, goal: float) -> _Solved | None:
        """Return the best mix of patterns in a box, with infinite value if there is none. Return
        None if the solver gave up.

        The variables are each option's share of its group, the maxima, the missing shares, and for
        each pattern the number of ranks with it.
        """
        count, maxima = len(self.shards), len(self.weights)
        first = 2 * count + maxima
        held = np.array(patterns).T / self.shards[:, None]  # [O, patterns]
        above = scipy.sparse.csr_matrix((self.fixed.shape[0] - count, len(patterns)))
        rows = scipy.sparse.hstack(
            [self.fixed, scipy.sparse.vstack([above, scipy.sparse.csr_matrix(-held)])], format="csr"
        )
        of_patterns = np.zeros((len(self.copies) + 1, len(patterns)))
        of_patterns[-1] = 1.0
        sums = scipy.sparse.hstack([self.one_each, scipy.sparse.csr_matrix(of_patterns)], format="csr")
        goals = np.zeros(first + len(patterns))
        goals[count : count + maxima], goals[count + maxima : first] = self.weights, MISSING * goal
        bounds = np.zeros((len(goals), 2))
        bounds[:, 1] = np.inf
        bounds[count : count + maxima] = np.stack([box.low, box.high], axis=1)
        found = scipy.optimize.linprog(
            goals, A_ub=rows, b_ub=np.zeros(rows.shape[0]), A_eq=sums,
            b_eq=np.append(np.ones(len(self.copies)), self.ranks), bounds=bounds, method="highs",
        )  # fmt: skip
        if found.status not in (0, 2):
            return None
        if found.status == 2:
            return _Solved(np.inf, 0.0, np.zeros(0), 0.0, box.low, box.low)
        return _Solved(
            float(found.fun) + self.latency,
            float(found.x[count + maxima : first].sum()),
            np.maximum(-found.ineqlin.marginals[-count:], 0.0) / self.shards,
            float(found.eqlin.marginals[-1]),
            found.x[count : count + maxima],
            found.lower.marginals[count : count + maxima],
        )

    def _find_pattern(self, prices: Floats, high: Floats, least: float) -> tuple[Floats | None, float]:
        """Return a pattern with a value above `least`, and an upper bound of any pattern's
        value.
        """
        from pipeline.extras.plan_bounds.pattern_kernels import Candidates, find_pattern

        use = np.concatenate([_shares(self.cost, high), _shares(self.memory, self.room)], axis=1)
        useful = np.flatnonzero((prices > 1e-12) & (use <= 1 + 1e-9).all(axis=1))
        unpriced = float(1e-12 * self.most.sum() * self.copies.max())
        if not len(useful):
            return None, least + unpriced
        most = np.minimum(self.most, 1e6)[useful] * self.copies[self.group[useful]]
        weights, bound = self._weigh_resources(prices[useful], use[useful], useful, most)
        if bound <= least * PRICED:
            return None, least * PRICED + unpriced
        surrogate = np.maximum(use[useful] @ weights, 1e-12)
        size = np.floor(np.log2(np.maximum(use[useful].max(axis=1), 1e-12)))
        # large shards first; small ones fill the rest
        order = np.lexsort((-prices[useful] / surrogate, -size))
        ordered, surrogate = useful[order], surrogate[order]
        candidates = Candidates(
            prices[ordered], np.ascontiguousarray(use[ordered]), surrogate, most[order], self.group[ordered],
            1 / self.most[ordered], self.copies, np.argsort(-prices[ordered] / surrogate, kind="stable"),
        )  # fmt: skip
        counts = np.zeros(len(ordered))
        worth, is_best = find_pattern(candidates, least, PRICED, NODES, counts)
        bound = min(bound, worth * PRICED) if is_best else bound
        if worth <= least * PRICED:
            return None, bound + unpriced
        pattern = np.zeros(len(prices))
        pattern[ordered] = counts
        return pattern, bound + unpriced

    def _weigh_resources(self, prices: Floats, use: Floats, options: Ranks, most: Floats) -> tuple[Floats, float]:
        """Return weights of the resources, the duals of the knapsack's linear program, and its
        value.
        """
        tables = np.zeros((len(self.copies), len(options)))
        tables[self.group[options], np.arange(len(options))] = 1 / self.most[options]
        found = scipy.optimize.linprog(
            -prices,
            A_ub=np.concatenate([use.T, tables]),
            b_ub=np.append(np.ones(use.shape[1]), self.copies),
            bounds=np.stack([np.zeros_like(most), most], axis=1),
            method="highs",
        )
        if found.status != 0:
            return np.full(use.shape[1], 1 / use.shape[1]), float(prices @ most)
        weights = np.maximum(-found.ineqlin.marginals[: use.shape[1]], 0.0)
        total = float(weights.sum())
        even = np.full(len(weights), 1 / len(weights))
        return (weights / total if total > 0 else even), -float(found.fun) * (1 + SAFE)

    def _tighten(self, box: Box, goal: float) -> Box | None:
        """Return the limits that the maxima have in every plan that costs less than `goal`, from a
        linear program that spreads loads evenly over ranks. Return None if there is no such plan.
        """
        count, maxima = len(self.shards), len(self.weights)
        even = self.fixed[: self.fixed.shape[0] - count, : count + maxima].toarray()
        held = np.concatenate([self.taken.T, np.zeros((len(self.room), maxima))], axis=1)
        rows = np.concatenate([even, held, np.append(np.zeros(count), self.weights)[None]])
        limits = np.concatenate([np.zeros(len(even)), self.all_room, [goal - self.latency]])
        bounds = np.zeros((count + maxima, 2))
        bounds[:, 1] = np.inf
        bounds[count:] = np.stack([box.low, box.high], axis=1)
        ends = [box.low.copy(), box.high.copy()]
        for maximum in range(maxima):
            for end, sign in enumerate((1.0, -1.0)):
                goals = np.zeros(count + maxima)
                goals[count + maximum] = sign
                found = scipy.optimize.linprog(
                    goals, A_ub=rows, b_ub=limits, A_eq=self.one_each[:-1, : count + maxima],
                    b_eq=np.ones(len(self.copies)), bounds=bounds, method="highs",
                )  # fmt: skip
                if found.status == 2:
                    return None
                if found.status == 0:
                    ends[end][maximum] = sign * (found.fun - SAFE * goal)
        return Box(np.maximum(ends[0], box.low), np.minimum(ends[1], box.high))

    def _rows(self) -> tuple[scipy.sparse.csr_matrix, scipy.sparse.csr_matrix]:
        """Return the rows of the program that must be <= 0 and the rows that must be 1. Rows <= 0:
        a maximum is at least its mean and a table's largest shard, and patterns hold the options'
        shares.

        Rows = 1: the shares of each group add up to 1. The last row does the same for patterns.
        """
        count, maxima, groups = len(self.shards), len(self.weights), len(self.copies)
        width, index = 2 * count + maxima, np.arange(count)
        means = np.zeros((maxima, width))
        means[:, :count] = (self.total * self.copies[self.group, None]).T / self.ranks
        means[np.arange(maxima), count + np.arange(maxima)] = -1.0
        largest = np.zeros((groups * maxima, width))
        for maximum in range(maxima):
            largest[maximum * groups + self.group, index] = self.largest[:, maximum]
            largest[maximum * groups : (maximum + 1) * groups, count + maximum] = -1.0
        held = np.zeros((count, width))
        held[index, index], held[index, count + maxima + index] = 1.0, -1.0
        one_each = np.zeros((groups + 1, width))
        one_each[self.group, index] = 1.0
        return scipy.sparse.csr_matrix(np.concatenate([means, largest, held])), scipy.sparse.csr_matrix(one_each)


def prove_bounds(
    problem: SearchProblem,
    objective: str,
    left_outs: Sequence[tuple[str, ...]],
    max_patterns: int,
    is_late: Callable[[], bool],
) -> Callable[[tuple[str, ...], float], bool]:
    """Return a function that returns whether every plan without the given kinds of sharding costs
    at least a cutoff.

    All its calls together look for at most `max_patterns` patterns, and stop if `is_late()`.
    """
    work = Work(max_patterns, is_late)
    bounds = {left_out: PatternBound(problem, objective, left_out) for left_out in left_outs}
    return lambda left_out, cutoff: bounds[left_out].proves(cutoff, work)


def _most_on_a_rank(problem: SearchProblem, option: Option) -> int:
    """Return how many shards of a table may be on one rank."""
    if option.rule in (Rule.EVERY_RANK, Rule.ONE_HOST) or option.distinct_ranks:
        return 1
    if option.rule is Rule.WHOLE_HOSTS:
        return -(-(option.num_shards // problem.ranks_per_host) // problem.num_hosts)
    return option.num_shards


def _shares(use: Floats, room: Floats) -> Floats:
    """Return [O, K]: the share of each resource's capacity that one shard of an option uses.

    If a resource has no capacity, options that fit do not use it, and the share is 0.
    """
    shares: Floats = np.where(use > 0, np.divide(use, room, out=np.full_like(use, np.inf), where=room > 0), 0.0)
    return shares


def _merge(every: Floats) -> tuple[list[int], Floats]:
    """Return the maxima to keep and their weights.

    If one load is always a multiple of another load, the two become one maximum with a larger
    weight.
    """
    kept: list[int] = []
    weights: list[float] = []
    for maximum in range(every.shape[1]):
        column = every[:, maximum]
        for position, other in enumerate(kept):
            base = every[:, other]
            if base.sum() > 0 and np.allclose(column, (ratio := column.sum() / base.sum()) * base, rtol=MERGED, atol=0):
                weights[position] += ratio
                break
        else:
            kept.append(maximum)
            weights.append(1.0)
    return kept, np.array(weights)
