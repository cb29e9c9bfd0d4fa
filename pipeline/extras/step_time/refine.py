"""Refine assignments by the price (predicted step) of complete plans: change or swap tables while
the price falls.

The search's costs are sums over shards, but the price of a step is not: the first replicated table
adds an all-reduce, and the last row-wise table removes gloo's collectives. So plans of a single
kind are also tried as starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.planner.search.problem import Assignment, Option, Ranks, Rule, SearchProblem, loads, violations

MIN_GAIN = 1e-6  # of the price; less is rounding
TRUSTED_GAIN = 0.03  # of the first start's price: the error of the difference of two plans' prices
MANY_RANKS = 8  # with more ranks, a free shard is only tried on the least loaded ranks
NUM_TRIED = 3
NUM_DESCENTS = 3  # from the cheapest starts
Price = Callable[[Assignment], float]


@dataclass(frozen=True, eq=False)
class Refined:
    """Hold the result. `start`: the price of the first assignment. `priced`: how many plans were priced."""

    assignment: Assignment
    price: float
    start: float
    priced: int


def refine(problem: SearchProblem, starts: Sequence[Assignment], price: Price, stop: Callable[[], bool]) -> Refined:
    """Descend from the best of `starts` and of one-kind variants of the first, until no single
    change lowers the price.

    The first start is returned if the price falls by less than TRUSTED_GAIN.
    """
    return _Descent(problem, price, stop).run(starts)


class _Descent:
    """Hold the state of a descent. `best` is the current assignment, and `value` its price.

    It starts again from several plans.
    """

    def __init__(self, problem: SearchProblem, price: Price, stop: Callable[[], bool]) -> None:
        self.problem, self._price, self._stop = problem, price, stop
        self.priced = 0
        self.best: Assignment | None = None
        self.value = np.inf

    def run(self, starts: Sequence[Assignment]) -> Refined:
        assert starts
        begun = [(self._price_of(start), start) for start in starts]
        first = begun[0][0]
        for variant in self._one_kind(starts[0]):
            if self._stop():
                break
            begun.append((self._price_of(variant), variant))
        ends = [self._descend(*start) for start in sorted(begun, key=lambda start: start[0])[:NUM_DESCENTS]]
        value, assignment = min(ends, key=lambda end: end[0])
        if value > first * (1 - TRUSTED_GAIN):
            value, assignment = first, starts[0]
        return Refined(assignment, value, first, self.priced)

    def _descend(self, value: float, start: Assignment) -> tuple[float, Assignment]:
        self.best, self.value = start, value
        while not self._stop() and (self._shard_otherwise() or self._exchange()):
            pass
        return self.value, self.best

    def _price_of(self, assignment: Assignment) -> float:
        self.priced += 1
        return self._price(assignment)

    def _offer(self, assignment: Assignment) -> bool:
        """Take a valid assignment if its price is lower."""
        if violations(self.problem, assignment):
            return False
        value = self._price_of(assignment)
        if not value < self.value * (1 - MIN_GAIN):
            return False
        self.best, self.value = assignment, value
        return True

    def _one_kind(self, start: Assignment) -> Iterator[Assignment]:
        """For each kind, give every table the cheapest option of that kind, if the table has one that fits."""
        tables = self.problem.tables
        for kind in sorted({option.kind for options in tables for option in options}):
            found = start
            for table, options in enumerate(tables):
                of_kind = [index for index, option in enumerate(options) if option.kind == kind]
                if of_kind and options[start.choices[table]].kind != kind:
                    cheapest = min(of_kind, key=lambda index: float(options[index].cost_ms.sum()))
                    placed = next(iter(self._places(found, table, options[cheapest])), None)
                    changed = None if placed is None else _with(found, table, cheapest, placed)
                    if changed is not None and not violations(self.problem, changed):
                        found = changed
            if found is not start:
                yield found

    def _shard_otherwise(self) -> bool:
        """Make the first change of each table that lowers the price, the most expensive table
        first. Return whether there was one.
        """
        assert self.best is not None
        costs = [
            -float(options[choice].cost_ms.sum())
            for options, choice in zip(self.problem.tables, self.best.choices, strict=True)
        ]
        lowered = False
        for table in np.argsort(costs, kind="stable").tolist():
            for choice, option in enumerate(self.problem.tables[table]):
                for ranks in self._places(self.best, table, option):
                    same = choice == self.best.choices[table] and bool((ranks == self.best.ranks[table]).all())
                    if self._stop():
                        return lowered
                    lowered |= not same and self._offer(_with(self.best, table, choice, ranks))
        return lowered

    def _exchange(self) -> bool:
        """Swap the ranks of two free tables of one shard each."""
        assert self.best is not None
        single = [
            table
            for table, (options, choice) in enumerate(zip(self.problem.tables, self.best.choices, strict=True))
            if options[choice].rule is Rule.ANY_RANK and options[choice].num_shards == 1
        ]
        for position, one in enumerate(single):
            for other in single[:position]:
                if self._stop():
                    return False
                ranks = self.best.ranks
                if ranks[one][0] != ranks[other][0]:
                    swapped = _with(self.best, one, self.best.choices[one], ranks[other])
                    if self._offer(_with(swapped, other, self.best.choices[other], ranks[one])):
                        return True
        return False

    def _places(self, assignment: Assignment, table: int, option: Option) -> Iterator[Ranks]:
        """Yield ranks for the option's shards, beginning with the ranks that have the smallest load
        without the table.
        """
        world, local = self.problem.world_size, self.problem.ranks_per_host
        if option.rule is Rule.EVERY_RANK:
            yield np.arange(world)
            return
        busy, _ = loads(self.problem, assignment)
        own = self.problem.tables[table][assignment.choices[table]]
        np.add.at(busy, assignment.ranks[table], -own.cost_ms)
        by_rank = busy.sum(axis=1)
        if option.rule is Rule.ANY_RANK and option.num_shards == 1:
            order = np.argsort(by_rank, kind="stable")
            for rank in order[: world if world < MANY_RANKS else NUM_TRIED].tolist():
                yield np.array([rank], dtype=np.intp)
        elif option.rule is Rule.ANY_RANK:
            yield _largest_first(by_rank, option)
        else:
            yield from self._on_hosts(by_rank.reshape(-1, local).sum(axis=1), by_rank, option)

    def _on_hosts(self, by_host: Ranks, by_rank: Ranks, option: Option) -> Iterator[Ranks]:
        local, count = self.problem.ranks_per_host, option.num_shards
        order = np.argsort(by_host, kind="stable")
        if option.rule is Rule.WHOLE_HOSTS:
            hosts = np.resize(order, count // local)
            yield (hosts[:, None] * local + np.arange(local)).ravel()
            return
        for host in order[:NUM_TRIED].tolist():
            if option.rule is Rule.ONE_HOST:
                yield host * local + np.arange(local)
            else:
                yield host * local + _largest_first(by_rank[host * local : (host + 1) * local], option)


def _largest_first(by_rank: Ranks, option: Option) -> Ranks:
    """Place each shard, the largest first, on the rank with the smallest sum."""
    sums, ranks = by_rank.astype(float), np.zeros(option.num_shards, dtype=np.intp)
    costs = option.cost_ms.sum(axis=1)
    for shard in np.argsort(-costs, kind="stable").tolist():
        ranks[shard] = int(sums.argmin())
        sums[ranks[shard]] += costs[shard]
    return ranks


def _with(assignment: Assignment, table: int, choice: int, ranks: Ranks) -> Assignment:
    choices, places = list(assignment.choices), list(assignment.ranks)
    choices[table], places[table] = choice, ranks
    return Assignment(choices, places)
