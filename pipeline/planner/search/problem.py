"""Define the placement problem and score an assignment: arguments and results are arrays.

A table has options, an option has shards, and a shard has a cost per phase and a size in each
memory. Shapes: S shards of an option, R ranks, P phases, M kinds of memory in bytes: HBM, host
memory, and more kinds such as SSD.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranks = NDArray[np.intp]
OBJECTIVES = ("critical_path", "max_rank")


class Rule(Enum):
    """State which ranks the shards of an option may have. TorchRec's sharding types are in brackets."""

    EVERY_RANK = "shard i on rank i (row_wise, data_parallel)"
    ANY_RANK = "each shard on any rank (table_wise, column_wise)"
    ONE_HOST = "shard i on the i-th rank of one host (table_row_wise)"
    WITHIN_HOST = "each shard on any rank of one host (table_column_wise)"
    WHOLE_HOSTS = "each run of ranks_per_host shards on a separate host (grid_shard)"


@dataclass(frozen=True, eq=False)
class Option:
    """Describe one way to shard one table. `kind`: its sharding type. `proposed`: TorchRec has this option too."""

    rule: Rule
    cost_ms: Floats  # [S, P]
    memory: Floats  # [S, M] bytes
    kind: str = ""
    proposed: bool = True
    distinct_ranks: bool = False  # no two shards on one rank (key_value kernels)

    @property
    def num_shards(self) -> int:
        return len(self.cost_ms)


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """`host_memory` limits the memory that the ranks of each host use together: [hosts] for the
    second kind of memory, or [hosts, M] for all kinds; infinity means no limit. `latency_ms`:
    Option.kind -> [P] milliseconds, which are added once if any table's option has this kind.
    """

    tables: list[list[Option]]
    capacity: Floats  # [R, M] bytes
    ranks_per_host: int
    host_memory: Floats | None = None  # bytes
    latency_ms: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.tables and all(self.tables), "every table needs an option"
        assert self.world_size % self.ranks_per_host == 0, "ranks fill whole hosts"

    @property
    def world_size(self) -> int:
        return len(self.capacity)

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.ranks_per_host

    @property
    def num_memories(self) -> int:
        return int(self.capacity.shape[1])

    @property
    def host_caps(self) -> Floats | None:
        """Return [hosts, M] bytes, or None if the ranks' limits are at least as strict."""
        if self.host_memory is None:
            return None
        caps = self.host_memory
        if caps.ndim == 1:
            caps = np.full((self.num_hosts, self.num_memories), np.inf)
            caps[:, 1] = self.host_memory
        by_rank = self.capacity.reshape(self.num_hosts, self.ranks_per_host, -1).sum(axis=1)
        return caps if (caps < by_rank).any() else None

    @property
    def num_options(self) -> int:
        return sum(len(options) for options in self.tables)

    @property
    def kind_ms(self) -> dict[str, float]:
        """Return the latency [ms] that each kind adds to the objective."""
        there = dict.fromkeys(option.kind for options in self.tables for option in options)
        sums = {kind: float(self.latency_ms[kind].sum()) for kind in there if kind in self.latency_ms}
        return {kind: total for kind, total in sums.items() if total > 0}


@dataclass(frozen=True, eq=False)
class Assignment:
    """Hold for each table the index of its option and the ranks of the option's shards."""

    choices: list[int]
    ranks: list[Ranks]


@dataclass(frozen=True)
class Score:
    """max_rank is the slowest rank's total cost. critical_path is the sum over phases of the slowest rank's cost."""

    max_rank_ms: float
    critical_path_ms: float

    def of(self, objective: str) -> float:
        return self.max_rank_ms if objective == "max_rank" else self.critical_path_ms


def loads(problem: SearchProblem, assignment: Assignment) -> tuple[Floats, Floats]:
    """Return the cost [R, P] and memory [R, M] of each rank."""
    num_phases = problem.tables[0][0].cost_ms.shape[1]
    cost, memory = np.zeros((problem.world_size, num_phases)), np.zeros_like(problem.capacity)
    for options, choice, ranks in zip(problem.tables, assignment.choices, assignment.ranks, strict=True):
        np.add.at(cost, ranks, options[choice].cost_ms)
        np.add.at(memory, ranks, options[choice].memory)
    return cost, memory


def score(problem: SearchProblem, assignment: Assignment) -> Score:
    cost, _ = loads(problem, assignment)
    latency = kinds_cost(problem, assignment)
    return Score(float(cost.sum(axis=1).max()) + latency, float(cost.max(axis=0).sum()) + latency)


def kinds_cost(problem: SearchProblem, assignment: Assignment) -> float:
    """Return the milliseconds of latency of all kinds in use."""
    used = {options[choice].kind for options, choice in zip(problem.tables, assignment.choices, strict=True)}
    return sum(total for kind, total in problem.kind_ms.items() if kind in used)


def violations(problem: SearchProblem, assignment: Assignment) -> list[str]:
    """List the capacities and rules that an assignment violates. The list is empty for a valid assignment."""
    _, memory = loads(problem, assignment)
    broken = [
        f"rank {rank} holds {memory[rank].tolist()} of {problem.capacity[rank].tolist()} bytes"
        for rank in np.flatnonzero((memory > problem.capacity).any(axis=1))
    ]
    if (caps := problem.host_caps) is not None:
        hosts = memory.reshape(problem.num_hosts, problem.ranks_per_host, -1).sum(axis=1)
        broken += [f"host {host} is over its memory" for host in np.flatnonzero((hosts > caps).any(axis=1))]
    broken += [
        f"table {table} breaks the rule: {options[choice].rule.value}"
        for table, (options, choice, ranks) in enumerate(
            zip(problem.tables, assignment.choices, assignment.ranks, strict=True)
        )
        if not keeps_rule(problem, options[choice], ranks)
    ]
    return broken


def keeps_rule(problem: SearchProblem, option: Option, ranks: Ranks) -> bool:
    local = problem.ranks_per_host
    if len(ranks) != option.num_shards or ranks.min() < 0 or ranks.max() >= problem.world_size:
        return False
    if option.distinct_ranks and len(set(ranks.tolist())) < len(ranks):
        return False
    if option.rule is Rule.EVERY_RANK:
        return bool((ranks == np.arange(problem.world_size)).all())
    if option.rule is Rule.WITHIN_HOST:
        return len(set((ranks // local).tolist())) == 1
    if option.rule in (Rule.ONE_HOST, Rule.WHOLE_HOSTS):
        blocks = ranks.reshape(-1, local)
        hosts = (blocks[:, 0] // local).tolist()
        aligned = bool((blocks == np.array(hosts)[:, None] * local + np.arange(local)).all())
        # a host twice only if there are more blocks than hosts
        most = -(-len(hosts) // problem.num_hosts)
        return aligned and max(hosts.count(host) for host in hosts) <= most
    return True


def worth_trying(problem: SearchProblem) -> list[list[int]]:
    """Return each table's options that fit on an empty rank and are not dominated; some tables may have none."""
    kept: list[list[int]] = []
    late = problem.kind_ms
    for options in problem.tables:
        fitting = [index for index, option in enumerate(options) if _fits_alone(problem, option)]
        undominated: list[int] = []
        for index in fitting:
            if any(dominates(options[other], options[index], late) for other in undominated):
                continue
            undominated = [other for other in undominated if not dominates(options[index], options[other], late)] + [
                index
            ]
        kept.append(sorted(undominated))
    return kept


def _fits_alone(problem: SearchProblem, option: Option) -> bool:
    if option.rule is Rule.EVERY_RANK:
        return bool((option.memory <= problem.capacity).all())
    if option.rule is Rule.ONE_HOST or option.rule is Rule.WHOLE_HOSTS:
        blocks = option.memory.reshape(-1, problem.ranks_per_host, problem.num_memories)
        hosts = problem.capacity.reshape(-1, problem.ranks_per_host, problem.num_memories)
        return all(bool(np.any((block <= hosts).all(axis=(1, 2)))) for block in blocks)
    fits = (option.memory[:, None, :] <= problem.capacity[None]).all(axis=2)  # [S, R]
    return bool(np.all(np.any(fits, axis=1)))


def narrow(problem: SearchProblem, kept: list[list[int]]) -> SearchProblem:
    """Return the problem with only the options whose indexes are given for each table."""
    tables = [[options[index] for index in indices] for options, indices in zip(problem.tables, kept, strict=True)]
    return replace(problem, tables=tables)


FREER_THAN = {
    Rule.EVERY_RANK: (Rule.EVERY_RANK,),
    Rule.ANY_RANK: (Rule.ANY_RANK, Rule.WITHIN_HOST, Rule.ONE_HOST, Rule.WHOLE_HOSTS, Rule.EVERY_RANK),
    Rule.WITHIN_HOST: (Rule.WITHIN_HOST, Rule.ONE_HOST),
    Rule.ONE_HOST: (Rule.ONE_HOST,),
    Rule.WHOLE_HOSTS: (Rule.WHOLE_HOSTS,),
}


def dominates(option: Option, other: Option, late: Iterable[str] = ()) -> bool:
    """Return whether `option` can always replace `other` without additional cost or memory.

    late: kinds with a latency. An option of such a kind can only replace an option of the same
    kind.
    """
    return (
        option.num_shards == other.num_shards
        and (option.kind == other.kind or option.kind not in late)
        and other.rule in FREER_THAN[option.rule]
        and not (option.distinct_ranks and not other.distinct_ranks)
        and bool((option.cost_ms <= other.cost_ms).all())
        and bool((option.memory <= other.memory).all())
    )
