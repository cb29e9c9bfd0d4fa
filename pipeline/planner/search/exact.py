"""Find the best assignment, or prove that none is better, by integer programming (HiGHS).

The variables are, for every option, how many of a group of equal tables have this option; for every
placement of the option, ranks, hosts or numbers of shards per rank; and for every kind with a
latency, whether it is in use. Equal ranks are interchangeable, so the first tables may only use the
first ranks and hosts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import scipy  # its parts load on first use: the integer programs take a third of a second

from pipeline.planner.search.problem import Assignment, Floats, Option, Ranks, Rule, SearchProblem
from pipeline.planner.search.ranks import project

BYTES_SCALE = 1 << 30
# with more ranks, renaming ranks saves more than the few bytes by which row shards differ
MANY_RANKS = 4
GAP = 1e-4  # relative; closer to the optimum is not needed
SAFE = 1e-6  # relative; the possible error of the bound by the solver's tolerances


@dataclass(frozen=True, eq=False)
class ExactResult:
    """Hold the result: no plan costs less than `bound_ms`. `assignment` is None if none below the cutoff was found."""

    assignment: Assignment | None
    bound_ms: float
    finished: bool


@dataclass(frozen=True, eq=False)
class _Way:
    """Hold the shards [S] that a variable places from `first_rank` on, or [similar blocks, S], if
    the variable is a number of these blocks.

    used: for such a number, the variable that counts the tables with these blocks and places no
    shard.
    """

    table: int
    choice: int
    first_rank: int
    shards: Ranks
    used: int | None = None


@dataclass
class _Matrix:
    """Hold the entries of a sparse matrix, which are added one by one."""

    values: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)

    def add(self, row: int, column: int, value: float) -> None:
        if value:
            self.values.append(value)
            self.rows.append(row)
            self.columns.append(column)

    def build(self, num_rows: int, num_columns: int) -> scipy.sparse.csr_matrix:
        return scipy.sparse.csr_matrix((self.values, (self.rows, self.columns)), shape=(num_rows, num_columns))


def equal_tables(problem: SearchProblem) -> list[list[int]]:
    """Group tables with equal options, because such tables can exchange their options without effect."""
    groups: dict[bytes, list[int]] = {}
    for table, options in enumerate(problem.tables):
        key = b"|".join(
            f"{option.rule.name}{option.kind}{option.distinct_ranks}{option.num_shards}".encode()
            + option.cost_ms.tobytes()
            + option.memory.tobytes()
            for option in options
        )
        groups.setdefault(key, []).append(table)
    return list(groups.values())


def count_variables(problem: SearchProblem) -> int:
    """Return the number of the program's variables, which decides whether the program is tried."""
    per_rule = {
        Rule.EVERY_RANK: 1,
        Rule.ONE_HOST: problem.num_hosts,
        Rule.WHOLE_HOSTS: problem.num_hosts + 1,
        Rule.ANY_RANK: problem.world_size + 1,
        Rule.WITHIN_HOST: problem.world_size + problem.num_hosts,
    }
    tables = [problem.tables[group[0]] for group in equal_tables(problem)]
    return sum(per_rule[option.rule] for options in tables for option in options)


def solve(
    problem: SearchProblem,
    objective: str,
    *,
    bound: float,
    cutoff: float | None,
    max_nodes: int,
    seconds: float,
    tolerance: float = GAP,
) -> ExactResult:
    """Find an assignment that costs less than `cutoff`, if there is one. `bound`: a known lower
    bound.

    The node limit ends the search at the same point on every machine. The limit of seconds or
    `tolerance` may end it earlier.
    """
    program = _Program(_level(problem) if problem.world_size > MANY_RANKS else problem, objective)
    found = program.solve(bound, cutoff, max_nodes, seconds, max(GAP, tolerance))
    if found.status == 2:  # infeasible: nothing below the cutoff, or nothing at all
        return ExactResult(None, bound if cutoff is None else max(bound, cutoff * (1 - GAP)), True)
    dual = found.mip_dual_bound
    proven = bound if dual is None or not np.isfinite(dual) else max(bound, float(dual) * (1 - SAFE))
    assignment = None if found.x is None else program.read(found.x)
    return ExactResult(assignment, min(proven, cutoff) if cutoff is not None else proven, found.status == 0)


class _Program:
    def __init__(self, problem: SearchProblem, objective: str) -> None:
        self.problem = problem
        self.costs = [[project(option, objective) for option in options] for options in problem.tables]
        self.num_memories = problem.num_memories
        self.num_maxima = self.costs[0][0].shape[1]
        self.load, self.memory, self.equal = _Matrix(), _Matrix(), _Matrix()
        self.totals: list[float] = []  # of the rows of `equal`
        self.upper: list[float] = []
        self.ways: list[_Way | None] = []  # None: the variable places no shards
        self.at_most = _Matrix()
        self.limits: list[float] = []  # of the rows of `at_most`
        self.symmetric = _ranks_are_alike(problem)
        self.late = problem.kind_ms
        self.in_use = {kind: self._new_variable(None, 1.0) for kind in self.late}
        self.groups = {group[0]: group for group in equal_tables(problem)}
        before = 0
        for table in self._by_size():
            copies = len(self.groups[table])
            shards = max(option.num_shards for option in problem.tables[table])
            # Shards of tables before the last of these, so this many ranks can be distinguished.
            self.first = before + (copies - 1) * shards
            self._add_tables(table, copies)
            if before == 0 and self.symmetric and self.first >= max(problem.ranks_per_host, problem.num_hosts) - 1:
                # the first shards may be anywhere, so only this order distinguishes equal ranks
                self._order_ranks(table)
            before += copies * shards
        self.first_maximum = len(self.upper)

    def _order_ranks(self, table: int) -> None:
        """Order a host's ranks by their number of unsharded tables of this group, and hosts by the total number."""
        local, options = self.problem.ranks_per_host, self.problem.tables[table]
        held: list[list[int]] = [[] for _ in range(self.problem.world_size)]
        for variable, way in enumerate(self.ways):
            if (
                way is not None
                and way.used is None
                and len(way.shards) == 1
                and options[way.choice].rule is Rule.ANY_RANK
            ):
                held[way.first_rank].append(variable)
        for rank in range(1, self.problem.world_size):
            if rank % local:
                self._no_more_than(held[rank], held[rank - 1])
        hosts = [
            list(itertools.chain.from_iterable(held[host * local : (host + 1) * local]))
            for host in range(self.problem.num_hosts)
        ]
        for before, host in itertools.pairwise(hosts):
            self._no_more_than(host, before)

    def _no_more_than(self, fewer: list[int], more: list[int]) -> None:
        row = self._new_limit(0.0)
        for variable in fewer:
            self.at_most.add(row, variable, 1.0)
        for variable in more:
            self.at_most.add(row, variable, -1.0)

    def _by_size(self) -> list[int]:
        """Return tables by decreasing cost: restricting expensive tables prunes most."""
        least = [min(float(cost.sum()) for cost in costs) for costs in self.costs]
        return sorted(self.groups, key=lambda table: (-least[table], table))

    def _add_tables(self, table: int, copies: int) -> None:
        """Add `table`, which represents a group with this number of equal tables."""
        problem, local = self.problem, self.problem.ranks_per_host
        self.copies = float(copies)
        choose = self._new_row(self.copies)
        self.kind_rows = {kind: self._new_limit(0.0) for kind in self.late}
        for kind, row in self.kind_rows.items():
            self.at_most.add(row, self.in_use[kind], -self.copies)
        for choice, option in enumerate(problem.tables[table]):
            whole = np.arange(option.num_shards)
            if option.rule is Rule.EVERY_RANK:
                self._add_way(choose, _Way(table, choice, 0, whole))
            elif option.rule is Rule.ONE_HOST:
                for host in self._hosts():
                    self._add_way(choose, _Way(table, choice, host * local, whole))
            elif option.rule is Rule.ANY_RANK and option.num_shards == 1:
                for rank in self._ranks():
                    self._add_way(choose, _Way(table, choice, rank, whole))
            elif option.rule is Rule.WITHIN_HOST:
                for host in self._hosts():
                    ranks = range(host * local, (host + 1) * local)
                    self._add_counts(choose, table, choice, [[shard] for shard in whole.tolist()], ranks)
            elif option.rule is Rule.WHOLE_HOSTS:
                firsts = range(0, problem.world_size, local)
                self._add_counts(choose, table, choice, whole.reshape(-1, local).tolist(), firsts)
            else:
                self._add_counts(
                    choose, table, choice, [[shard] for shard in whole.tolist()], range(problem.world_size)
                )

    def _add_counts(self, choose: int, table: int, choice: int, blocks: list[list[int]], first_ranks: range) -> None:
        """Add blocks of shards that may be on different ranks: a variable counts similar blocks from each rank on."""
        used = self._new_variable(_Way(table, choice, 0, np.empty(0, dtype=np.intp)), self.copies)
        self._choose(choose, used, table, choice)
        option, per_rank = self.problem.tables[table][choice], len(blocks)
        if option.rule is Rule.WHOLE_HOSTS:
            per_rank = -(-len(blocks) // self.problem.num_hosts)
        elif option.distinct_ranks:
            per_rank = 1
        alike = _alike(option, blocks)
        limits = {rank: self._new_limit(0.0) for rank in first_ranks} if per_rank < len(blocks) else {}
        for row in limits.values():
            self.at_most.add(row, used, -float(per_rank))
        for group in alike:
            total = self._new_row(0.0)
            self.equal.add(total, used, -float(len(group)))
            for first_rank in first_ranks:
                way = self._new_variable(
                    _Way(table, choice, first_rank, np.array(group), used), self.copies * min(len(group), per_rank)
                )
                self.equal.add(total, way, 1.0)
                self._lay(way, table, choice, first_rank, group[0])
                if first_rank in limits:
                    self.at_most.add(limits[first_rank], way, 1.0)

    def _add_way(self, choose: int, way: _Way) -> None:
        """Add the placement that puts all shards on ranks from `way.first_rank` on."""
        variable = self._new_variable(way, self.copies)
        self._choose(choose, variable, way.table, way.choice)
        self._lay(variable, way.table, way.choice, way.first_rank, way.shards.tolist())

    def _choose(self, choose: int, variable: int, table: int, choice: int) -> None:
        """Add a variable of the table's group; they sum to 1. The option's kind is then in use."""
        self.equal.add(choose, variable, 1.0)
        kind = self.problem.tables[table][choice].kind
        if kind in self.late:
            self.at_most.add(self.kind_rows[kind], variable, 1.0)

    def _ranks(self) -> list[int]:
        """List the ranks to try. Of equal ranks, list the ranks in use and the first unused rank."""
        local = self.problem.ranks_per_host
        every = range(self.problem.world_size)
        return [rank for rank in every if not self.symmetric or max(rank // local, rank % local) <= self.first]

    def _hosts(self) -> list[int]:
        return [host for host in range(self.problem.num_hosts) if not self.symmetric or host <= self.first]

    def _lay(self, variable: int, table: int, choice: int, first_rank: int, shards: list[int]) -> None:
        costs, memory = self.costs[table][choice], self.problem.tables[table][choice].memory
        for rank, shard in enumerate(shards, start=first_rank):
            for maximum in range(self.num_maxima):
                self.load.add(rank * self.num_maxima + maximum, variable, float(costs[shard, maximum]))
            for tier in range(self.num_memories):
                self.memory.add(rank * self.num_memories + tier, variable, float(memory[shard, tier]) / BYTES_SCALE)

    def _new_variable(self, way: _Way | None, upper: float) -> int:
        self.ways.append(way)
        self.upper.append(upper)
        return len(self.upper) - 1

    def _new_row(self, total: float) -> int:
        self.totals.append(total)
        return len(self.totals) - 1

    def _new_limit(self, limit: float) -> int:
        self.limits.append(limit)
        return len(self.limits) - 1

    def solve(  # type: ignore[no-untyped-def]
        self, bound: float, cutoff: float | None, max_nodes: int, seconds: float, tolerance: float
    ):
        """Return scipy's OptimizeResult."""
        problem, width = self.problem, self.first_maximum + self.num_maxima
        for rank in range(problem.world_size):
            for maximum in range(self.num_maxima):
                self.load.add(rank * self.num_maxima + maximum, self.first_maximum + maximum, -1.0)
        goal = np.zeros(width)
        goal[self.first_maximum :] = 1.0
        for kind, variable in self.in_use.items():
            goal[variable] = self.late[kind]
        constraints = [
            scipy.optimize.LinearConstraint(self.load.build(problem.world_size * self.num_maxima, width), -np.inf, 0.0),
            scipy.optimize.LinearConstraint(
                self.memory.build(problem.capacity.size, width), -np.inf, problem.capacity.ravel() / BYTES_SCALE
            ),
            scipy.optimize.LinearConstraint(self.equal.build(len(self.totals), width), self.totals, self.totals),
            scipy.optimize.LinearConstraint(self.at_most.build(len(self.limits), width), -np.inf, self.limits),
            scipy.optimize.LinearConstraint(goal[None], bound, np.inf if cutoff is None else cutoff * (1 - GAP)),
        ]
        if (caps := problem.host_caps) is not None:
            constraints.append(self._host_rows(caps, width))
        integral = np.ones(width)
        integral[self.first_maximum :] = 0
        upper = np.array([*self.upper, *[np.inf] * self.num_maxima])
        return scipy.optimize.milp(
            goal,
            constraints=constraints,
            integrality=integral,
            bounds=scipy.optimize.Bounds(np.zeros(width), upper),
            options={"time_limit": seconds, "node_limit": max_nodes, "mip_rel_gap": tolerance},
        )

    def _host_rows(self, caps: Floats, width: int) -> scipy.optimize.LinearConstraint:
        rows = _Matrix()
        for row, column, value in zip(self.memory.rows, self.memory.columns, self.memory.values, strict=True):
            rank, tier = divmod(row, self.num_memories)
            rows.add(rank // self.problem.ranks_per_host * self.num_memories + tier, column, value)
        return scipy.optimize.LinearConstraint(rows.build(caps.size, width), -np.inf, caps.ravel() / BYTES_SCALE)

    def read(self, values: Floats) -> Assignment:
        """Return the assignment of a solution.

        A solution says how many tables of a group have an option on given ranks, and not which
        tables. They are taken in the order of the group.
        """
        choices = [0] * len(self.problem.tables)
        placements: list[dict[int, int]] = [{} for _ in choices]  # per table: shard -> rank
        left = {table: list(group) for table, group in self.groups.items()}
        owners: dict[int, list[int]] = {}  # variable `used` -> tables
        counted: dict[tuple[int, bytes], list[tuple[_Way, int]]] = {}
        for variable in np.flatnonzero(np.rint(values[: self.first_maximum])).tolist():
            way, count = self.ways[variable], round(float(values[variable]))
            if way is None:
                continue
            if way.used is not None:
                counted.setdefault((way.used, way.shards.tobytes()), []).append((way, count))
                continue
            tables, left[way.table] = left[way.table][:count], left[way.table][count:]
            owners[variable] = tables
            for table in tables:
                choices[table] = way.choice
                placements[table].update(
                    {shard: way.first_rank + index for index, shard in enumerate(way.shards.tolist())}
                )
        for (used, _), ways in counted.items():
            _deal(owners.get(used, []), ways, placements)
        ranks = [np.array([rank_of[shard] for shard in sorted(rank_of)], dtype=np.intp) for rank_of in placements]
        return Assignment(choices, ranks)


def _deal(tables: list[int], ways: list[tuple[_Way, int]], placements: list[dict[int, int]]) -> None:
    """Assign similar blocks to the tables in turn, so that no table has too many blocks on one rank."""
    first_ranks = [way.first_rank for way, count in ways for _ in range(count)]
    blocks = ways[0][0].shards.tolist()
    for position, first_rank in enumerate(first_ranks[: len(tables) * len(blocks)]):
        number, table = divmod(position, len(tables))
        placements[tables[table]].update({shard: first_rank + index for index, shard in enumerate(blocks[number])})


def _alike(option: Option, blocks: list[list[int]]) -> list[list[list[int]]]:
    """Group blocks of equal cost and memory."""
    groups: dict[bytes, list[list[int]]] = {}
    for block in blocks:
        key = option.cost_ms[block].tobytes() + option.memory[block].tobytes()
        groups.setdefault(key, []).append(block)
    return list(groups.values())


def _level(problem: SearchProblem) -> SearchProblem:
    """Give shorter row shards the cost of their cheapest siblings. No plan becomes more expensive."""

    def leveled(option: Option) -> Option:
        if option.rule in (Rule.ANY_RANK, Rule.WITHIN_HOST):
            return option
        cost, memory = (np.broadcast_to(values.min(axis=0), values.shape) for values in (option.cost_ms, option.memory))
        return replace(option, cost_ms=cost, memory=memory)

    tables = [[leveled(option) for option in options] for options in problem.tables]
    return replace(problem, tables=tables)


def _ranks_are_alike(problem: SearchProblem) -> bool:
    """Return whether the ranks of a host, and the hosts, can be exchanged without changing a plan's cost."""
    if (problem.capacity != problem.capacity[0]).any():
        return False
    if problem.host_memory is not None and (problem.host_memory != problem.host_memory[0]).any():
        return False
    return all(
        option.rule in (Rule.ANY_RANK, Rule.WITHIN_HOST)
        or bool((option.cost_ms == option.cost_ms[0]).all() and (option.memory == option.memory[0]).all())
        for options in problem.tables
        for option in options
    )
