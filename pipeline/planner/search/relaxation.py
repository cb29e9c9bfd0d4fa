"""Bound the cost of any plan from below, and choose the options of the bound (linear programs by
HiGHS).

The relaxation places no shard: each load may be spread evenly over ranks. A maximum over ranks is
at least the mean, and at least the largest chosen shard plus the load that every rank has. A kind's
latency is multiplied by the largest share that any table gives to this kind. The bound is higher if
each table must take exactly one option.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import scipy  # its parts load on first use: the integer programs take a third of a second
from numpy.typing import NDArray

from pipeline.planner.search.problem import Floats, Rule, SearchProblem
from pipeline.planner.search.ranks import project

BYTES_SCALE = 1 << 30
FIT_THRESHOLDS = (0.1, 0.2, 0.25, 1 / 3, 0.4, 0.5)
SAFE = 1e-6  # relative; the possible error of a bound by the solver's tolerances
GAP = 1e-3  # relative; for options that are not divided
CROWDING = 0.5  # of a maximum: a host's shards that use this much leave little for others
CROWDED_TABLES = 4  # at most, the largest
CROWDED_RATES = (1.0, 0.7, 0.5, 0.35, 0.25)  # of the highest ratio of two loads
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Hold a solution. `bound_ms` is None if nothing fits; then other fields are empty. For each
    option: its share of the table, and the minimum increase of the bound if the option is chosen.
    """

    bound_ms: float | None
    shares: list[Floats]
    raises_ms: list[Floats]
    maxima_ms: Floats  # they sum up to the bound without latency


@dataclass(frozen=True, eq=False)
class Choice:
    """Hold one option per table with the minimum total cost for evenly spread loads, and the bound."""

    choices: tuple[int, ...]
    bound_ms: float
    maxima_ms: Floats


class LinearProgram:
    """The relaxation under an objective, solved several times with some options excluded.

    The variables are each option's share, each maximum, the part of each maximum that every rank
    has, and each kind with a latency.
    """

    def __init__(self, problem: SearchProblem, objective: str) -> None:
        self.problem = problem
        self.costs = [[project(option, objective) for option in options] for options in problem.tables]
        self.num_maxima = self.costs[0][0].shape[1]
        self.sizes = [len(options) for options in problem.tables]
        self.num_options = sum(self.sizes)
        self.starts = np.cumsum([0, *self.sizes[:-1]])
        self.late = problem.kind_ms
        self.width = self.num_options + 2 * self.num_maxima + len(self.late)
        options = [option for table in problem.tables for option in table]
        costs = [cost for table in self.costs for cost in table]
        self.kinds = [option.kind for option in options]
        everywhere = np.array([option.rule is Rule.EVERY_RANK for option in options])[:, None]
        self.largest = np.array([cost.max(axis=0) for cost in costs])  # [options, maxima]
        self.least = np.where(everywhere, np.array([cost.min(axis=0) for cost in costs]), 0.0)
        self.total = np.array([cost.sum(axis=0) for cost in costs])
        squares = np.array([(cost * cost).sum(axis=0) for cost in costs])
        self.squares = np.where(everywhere, 0.0, squares)
        self.memory = np.array([option.memory.sum(axis=0) for option in options])
        self.rows, self.limits = self._rows()
        ends = np.repeat(np.arange(len(self.sizes)), self.sizes)
        shape = (len(self.sizes), self.width)
        self.one_each = scipy.sparse.csr_matrix((np.ones(len(ends)), (ends, np.arange(len(ends)))), shape=shape)

    def crowd(self, relaxation: Relaxation) -> bool:
        """Add rows for tables whose shards nearly fill one maximum on a complete host. Return True
        if any.

        For n ranks that hold such an option's shards, and for any rate, the load of maximum p is at
        most n times `rate` times maximum q, plus the part of the shards' p that exceeds `rate`
        times their q. Other ranks have at most maximum p. So a load that does not fit on other
        ranks raises p or q.
        """
        shares = np.concatenate(relaxation.shares)
        filled = self.largest / np.maximum(relaxation.maxima_ms, 1e-12)
        options = [option for table in self.problem.tables for option in table]
        rows: list[Floats] = []
        tables = 0
        for index in np.argsort(-filled.max(axis=1), kind="stable"):
            is_crowded = filled[index].max() >= CROWDING and shares[index] >= 0.5
            if (
                is_crowded
                and options[index].rule is Rule.ONE_HOST
                and options[index].num_shards < self.problem.world_size
            ):
                for full in np.flatnonzero(filled[index] >= CROWDING):
                    rows += self._crowded_rows(int(index), int(full))
                tables += 1
                if tables == CROWDED_TABLES:
                    break
        if rows:
            self.rows = scipy.sparse.vstack([self.rows, scipy.sparse.csr_matrix(np.array(rows))], format="csr")
            self.limits = np.concatenate([self.limits, np.zeros(len(rows))])
        return bool(rows)

    def _crowded_rows(self, index: int, full: int) -> list[Floats]:
        """Return one row for each other maximum and each rate. `full`: the maximum that the shards nearly fill."""
        costs = [cost for table in self.costs for cost in table]
        starts, shards = np.cumsum([0, *map(len, costs[:-1])]), np.concatenate(costs)
        own, count, world = costs[index], len(costs[index]), self.problem.world_size
        rows = []
        for other in range(self.num_maxima):
            both = (shards[:, full] > 0) & (shards[:, other] > 0)
            if other == full or not both.any():
                continue
            highest = float((shards[both, other] / shards[both, full]).max())
            for rate in (share * highest for share in CROWDED_RATES):
                row = np.zeros(self.width)
                beyond = np.add.reduceat(np.maximum(shards[:, other] - rate * shards[:, full], 0.0), starts)
                row[: self.num_options] = self.total[:, other] - beyond
                row[index] = self.total[index, other] - float((own[:, other] - rate * own[:, full]).sum())
                row[self.num_options + other], row[self.num_options + full] = count - world, -count * rate
                rows.append(row)
        return rows

    def small_shards(self, limits_ms: Floats) -> Mask:
        """Return [options] bool: no shard exceeds the limits [maxima], or the option is its table's smallest."""
        free = self.largest - self.least
        excess = np.max(free / np.maximum(limits_ms, 1e-12), axis=1)
        least = np.repeat(np.minimum.reduceat(excess, self.starts), self.sizes)
        allowed: Mask = excess <= np.maximum(1.0, least)
        return allowed

    def lumps(self, maxima_ms: Floats) -> Floats:
        """Return [options]: how hard the shards are to spread. n equal shards count 1/n of one shard with their sum."""
        per_rank = self.squares / np.maximum(maxima_ms, 1e-12) / self.problem.world_size
        summed: Floats = per_rank.sum(axis=1)
        return summed

    def solve(self, allowed: Mask | None = None, without: Collection[str] = (), all_in_use: bool = False) -> Relaxation:
        """Bound the cost of plans that use only `allowed` options and no kind in `without`.

        With `without` or `all_in_use`, all other kinds with a latency count as in use.
        """
        goal, bounds = self._goal(), self._bounds(allowed, without, all_in_use)
        found = scipy.optimize.linprog(
            goal, A_ub=self.rows, b_ub=self.limits, A_eq=self.one_each, b_eq=np.ones(len(self.sizes)), bounds=bounds,
            method="highs",
        )  # fmt: skip
        if found.status != 0:
            return Relaxation(None, [], [], np.zeros(0))
        ends = np.cumsum(self.sizes)[:-1]
        shares = np.split(found.x[: self.num_options], ends)
        raises = np.split(np.maximum(found.lower.marginals[: self.num_options], 0.0), ends)
        return Relaxation(float(found.fun) * (1 - SAFE), shares, raises, self._maxima(found.x))

    def choose(
        self,
        allowed: Mask | None = None,
        *,
        nodes: int,
        seconds: float,
        without: Collection[str] = (),
        unevenness: Floats | None = None,
    ) -> Choice | None:
        """Return one complete option per table, or None if no solution was found.

        unevenness [options]: milliseconds to add to each option's cost (see lumps). The bound is
        valid only without `unevenness`.
        """
        goal = self._goal()
        if unevenness is not None:
            goal[: self.num_options] += unevenness
        bounds = self._bounds(allowed, without, bool(without))
        whole = np.zeros(self.width)
        whole[: self.num_options] = 1
        constraints = [
            scipy.optimize.LinearConstraint(self.rows, -np.inf, self.limits),
            scipy.optimize.LinearConstraint(self.one_each, 1.0, 1.0),
        ]
        found = scipy.optimize.milp(
            goal,
            constraints=constraints,
            integrality=whole,
            bounds=scipy.optimize.Bounds(bounds[:, 0], bounds[:, 1]),
            options={"node_limit": nodes, "time_limit": max(0.1, seconds), "mip_rel_gap": GAP},
        )
        if found.x is None:
            return None
        shares = np.split(found.x[: self.num_options], np.cumsum(self.sizes)[:-1])
        choices = tuple(int(of_table.argmax()) for of_table in shares)
        bound = 0.0 if found.mip_dual_bound is None else float(found.mip_dual_bound)
        return Choice(choices, bound * (1 - SAFE), self._maxima(found.x))

    def _maxima(self, values: Floats) -> Floats:
        return values[self.num_options : self.num_options + self.num_maxima]

    def _goal(self) -> Floats:
        count = self.num_maxima
        return np.concatenate([np.zeros(self.num_options), np.ones(count), np.zeros(count), list(self.late.values())])

    def _bounds(self, allowed: Mask | None, without: Collection[str], all_in_use: bool) -> Floats:
        """Return [variables, 2]: the minimum and the maximum of each variable."""
        bounds = np.zeros((self.width, 2))
        bounds[: self.num_options, 1] = 1.0 if allowed is None else allowed
        bounds[self.num_options :, 1] = np.inf
        if without:
            bounds[: self.num_options][np.isin(self.kinds, list(without)), 1] = 0.0
        if without or all_in_use:
            bounds[self.width - len(self.late) :] = [[kind not in without] * 2 for kind in self.late]
        return bounds

    def _rows(self) -> tuple[scipy.sparse.csr_matrix, Floats]:
        """Return the rows of the program, and the limits that they must not exceed."""
        problem, count, maxima = self.problem, self.num_options, self.num_maxima
        means = np.zeros((2 * maxima, self.width))
        index = np.arange(maxima)
        means[:maxima, :count], means[index, count + index] = self.total.T, -problem.world_size
        means[maxima:, :count], means[maxima + index, count + maxima + index] = self.least.T, -1.0
        room = problem.capacity.sum(axis=0)
        if (caps := problem.host_caps) is not None:
            room = np.minimum(room, caps.sum(axis=0))
        packing = [*((self.memory[:, tier] / BYTES_SCALE, room[tier] / BYTES_SCALE) for tier in range(len(room)))]
        packing += self._packing_rows()
        held = np.zeros((len(packing), self.width))
        held[:, :count] = [row for row, _ in packing]
        largest, used = self._largest_shard_rows(), self._kind_rows()
        rows = scipy.sparse.vstack(
            [scipy.sparse.csr_matrix(means), scipy.sparse.csr_matrix(held), largest, used], format="csr"
        )
        zeros = np.zeros(largest.shape[0] + used.shape[0])
        return rows, np.concatenate([np.zeros(2 * maxima), [limit for _, limit in packing], zeros])

    def _kind_rows(self) -> scipy.sparse.csr_matrix:
        """Return rows that make a kind's variable at least as large as each table's share of the kind."""
        tables = np.repeat(np.arange(len(self.sizes)), self.sizes)
        kinds = np.array(self.kinds)
        data, row, column, line = [], [], [], 0
        for position, kind in enumerate(self.late):
            of_kind = np.flatnonzero(kinds == kind)
            owners, lines = np.unique(tables[of_kind], return_inverse=True)
            data += [1.0] * len(of_kind) + [-1.0] * len(owners)
            row += [*(line + lines).tolist(), *range(line, line + len(owners))]
            column += [*of_kind.tolist(), *[self.width - len(self.late) + position] * len(owners)]
            line += len(owners)
        return scipy.sparse.csr_matrix((data, (row, column)), shape=(line, self.width))

    def _packing_rows(self) -> list[tuple[Floats, float]]:
        """Return rows that force two shards to be on two ranks if each needs more than half of a
        rank's memory.

        They are Martello and Toth's functions for bin packing: a shard below a threshold counts
        nothing, a shard above one minus the threshold a complete rank. All ranks must have equal
        memory.
        """
        rows = []
        for tier in range(self.problem.num_memories):
            room = self.problem.capacity[:, tier]
            if room.min() != room.max() or room[0] <= 0:
                continue
            parts = [option.memory[:, tier] / room[0] for options in self.problem.tables for option in options]
            for threshold in FIT_THRESHOLDS:
                counted = [
                    float(np.where(part > 1 - threshold, 1.0, np.where(part >= threshold, part, 0.0)).sum())
                    for part in parts
                ]
                rows.append((np.array(counted), float(self.problem.world_size)))
        return rows

    def _largest_shard_rows(self) -> scipy.sparse.csr_matrix:
        """Return rows that make a maximum at least a table's largest shard, averaged over the shares of its options."""
        count = len(self.sizes)
        tables, lines, ones = np.repeat(np.arange(count), self.sizes), np.arange(count), np.ones(count)
        blocks = []
        for maximum in range(self.num_maxima):
            shards = (self.largest - self.least)[:, maximum]
            variables = np.full(count, self.num_options + maximum)
            data = np.concatenate([shards, -ones, ones])
            row = np.concatenate([tables, lines, lines])
            column = np.concatenate([np.arange(self.num_options), variables, variables + self.num_maxima])
            blocks.append(scipy.sparse.csr_matrix((data, (row, column)), shape=(count, self.width)))
        return scipy.sparse.vstack(blocks, format="csr")
