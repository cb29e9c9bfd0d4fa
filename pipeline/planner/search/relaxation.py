"""Bound from below what any plan costs, and let the bound's prices choose options (linear programs by HiGHS).

The relaxation lets a table be split between options and a load be spread evenly over ranks: no maximum over ranks
can be below the mean, nor below the largest shard of what was chosen. A kind's latency counts by the largest share
that any table gives the kind.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, vstack

from pipeline.planner.search.problem import Floats, SearchProblem
from pipeline.planner.search.ranks import project

BYTES_SCALE = 1 << 30
SHARD_LIMITS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.2)  # of the bound; what may be the largest
FIT_THRESHOLDS = (0.1, 0.2, 0.25, 1 / 3, 0.4, 0.5)


@dataclass(frozen=True, eq=False)
class Relaxation:
    """`bound_ms` is None where even the relaxation has no solution: then nothing fits, and the rest is empty.

    Per option: its share of the table, and by how much at least it raises the bound where it is chosen.
    """

    bound_ms: float | None
    shares: list[Floats]
    raises_ms: list[Floats]
    maxima_ms: Floats  # what the bound is the sum of


class LinearProgram:
    """The relaxation of a problem under an objective; solved again and again with some options left out."""

    def __init__(self, problem: SearchProblem, objective: str) -> None:
        self.problem = problem
        self.costs = [[project(option, objective) for option in options] for options in problem.tables]
        self.num_maxima = self.costs[0][0].shape[1]
        self.sizes = [len(options) for options in problem.tables]
        self.num_options = sum(self.sizes)
        self.largest = np.array([cost.max(axis=0).sum() for mine in self.costs for cost in mine])
        self.kinds = [option.kind for options in problem.tables for option in options]
        self.late = problem.kind_ms
        self.rows, self.limits = self._rows()
        ends = np.repeat(np.arange(len(self.sizes)), self.sizes)
        width = self.num_options + self.num_maxima + len(self.late)
        self.one_each = csr_matrix((np.ones(len(ends)), (ends, np.arange(len(ends)))), shape=(len(self.sizes), width))

    def solve(
        self, largest_shard_ms: float = np.inf, without: Collection[str] = (), all_in_use: bool = False
    ) -> Relaxation:
        """Without the options whose largest shard costs more; a table keeps its option of the smallest shards.

        `without`: kinds that no table may have. All others that have a latency then count as in use, as with `all_in_use`.
        """
        upper = (self.largest <= largest_shard_ms).astype(float)
        start = 0
        for size in self.sizes:
            mine = slice(start, start + size)
            if not upper[mine].any():
                upper[start + int(self.largest[mine].argmin())] = 1.0
            start += size
        if without:
            upper[np.isin(self.kinds, list(without))] = 0.0
        goal = np.concatenate([np.zeros(self.num_options), np.ones(self.num_maxima), list(self.late.values())])
        bounds = np.zeros((len(goal), 2))
        bounds[: self.num_options, 1] = upper
        bounds[self.num_options :, 1] = np.inf
        if without or all_in_use:
            bounds[self.num_options + self.num_maxima :] = [[kind not in without] * 2 for kind in self.late]
        found = linprog(
            goal, A_ub=self.rows, b_ub=self.limits, A_eq=self.one_each, b_eq=np.ones(len(self.sizes)), bounds=bounds,
            method="highs",
        )  # fmt: skip
        if found.status != 0:
            return Relaxation(None, [], [], np.zeros(0))
        ends = np.cumsum(self.sizes)[:-1]
        shares = np.split(found.x[: self.num_options], ends)
        raises = np.split(np.maximum(found.lower.marginals[: self.num_options], 0.0), ends)
        # A dual bound of a linear program is off by its tolerance at most; this much below it is safe.
        maxima = found.x[self.num_options : self.num_options + self.num_maxima]
        return Relaxation(float(found.fun) * (1 - 1e-7), shares, raises, maxima)

    def _rows(self) -> tuple[csr_matrix, Floats]:
        """Rows <= limits over [options, maxima, kinds with a latency]."""
        problem, count = self.problem, self.num_options
        sums = np.array([cost.sum(axis=0) for mine in self.costs for cost in mine])
        memory = np.array([option.memory.sum(axis=0) for options in problem.tables for option in options])
        dense_rows, limits = [], []
        beside = np.zeros(self.num_maxima + len(self.late))
        for maximum in range(self.num_maxima):
            row = np.zeros(count + len(beside))
            row[:count], row[count + maximum] = sums[:, maximum], -problem.world_size
            dense_rows.append(row)
            limits.append(0.0)
        host_room = np.inf if problem.host_memory is None else problem.host_memory.sum()
        room = np.minimum(problem.capacity.sum(axis=0), [np.inf, host_room])
        for tier in range(2):
            dense_rows.append(np.concatenate([memory[:, tier] / BYTES_SCALE, beside]))
            limits.append(room[tier] / BYTES_SCALE)
        for row, limit in self._packing_rows():
            dense_rows.append(np.concatenate([row, beside]))
            limits.append(limit)
        largest = self._largest_shard_rows()
        used = self._kind_rows()
        rows = vstack([csr_matrix(np.array(dense_rows)), largest, used], format="csr")
        return rows, np.concatenate([limits, np.zeros(largest.shape[0] + used.shape[0])])

    def _kind_rows(self) -> csr_matrix:
        """For each kind with a latency and each table: the kind is in use by no less than the table's share of it."""
        data, row, column, line = [], [], [], 0
        for position, kind in enumerate(self.late):
            first = 0
            for options in self.problem.tables:
                mine = [first + index for index, option in enumerate(options) if option.kind == kind]
                if mine:
                    data += [*[1.0] * len(mine), -1.0]
                    row += [line] * (len(mine) + 1)
                    column += [*mine, self.num_options + self.num_maxima + position]
                    line += 1
                first += len(options)
        return csr_matrix((data, (row, column)), shape=(line, self.num_options + self.num_maxima + len(self.late)))

    def _packing_rows(self) -> list[tuple[Floats, float]]:
        """Two shards that each take more than half of a rank's memory need two ranks, whatever the sum says.

        Martello and Toth's functions for bin packing: below a threshold a shard counts nothing, above one less the
        threshold a whole rank. Only where all ranks have the same memory.
        """
        rows = []
        for tier in range(2):
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

    def _largest_shard_rows(self) -> csr_matrix:
        """For each table: a maximum is no less than the largest shard of the table's options, by their shares."""
        data, row, column = [], [], []
        first = 0
        for table, mine in enumerate(self.costs):
            for maximum in range(self.num_maxima):
                line = table * self.num_maxima + maximum
                for index, cost in enumerate(mine):
                    data.append(float(cost[:, maximum].max()))
                    row.append(line)
                    column.append(first + index)
                data.append(-1.0)
                row.append(line)
                column.append(self.num_options + maximum)
            first += len(mine)
        shape = (len(self.costs) * self.num_maxima, self.num_options + self.num_maxima + len(self.late))
        return csr_matrix((data, (row, column)), shape=shape)
