"""Find where memory is missing: place all tables with as few bytes over the capacities as
possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.planner.search.problem import Floats, Option, Ranks, Rule, SearchProblem, worth_trying

ROUNDS = 4  # of placing the tables on overfull ranks again


@dataclass(frozen=True, eq=False)
class Shortfall:
    """Hold the attempt that exceeds the capacities least: options, ranks and the excess."""

    choices: list[int]
    ranks: list[Ranks]
    over: Floats  # [R, M] bytes beyond each rank's capacity
    host_over: Floats  # [hosts, M] bytes beyond each host's; zero without such a limit

    def tables_on(self, rank: int) -> list[int]:
        return [table for table, ranks in enumerate(self.ranks) if rank in ranks.tolist()]


def least_shortfall(problem: SearchProblem) -> Shortfall:
    """Place the largest table first, each where it adds the least excess. Then place tables on overfull ranks again."""
    attempt = _Attempt(problem)
    least = [min(float(option.memory.sum()) for option in options) for options in problem.tables]
    order = sorted(range(len(least)), key=lambda table: (-least[table], table))
    for table in order:
        attempt.place(table)
    for _ in range(ROUNDS):
        if not attempt.excess(attempt.memory):
            break
        for table in order:
            attempt.take(table)
            attempt.place(table)
    over = np.maximum(attempt.memory - problem.capacity, 0.0)
    return Shortfall(attempt.choices, attempt.ranks, over, attempt.host_over(attempt.memory))


class _Attempt:
    def __init__(self, problem: SearchProblem) -> None:
        self.problem, self.caps = problem, problem.host_caps
        self.memory = np.zeros_like(problem.capacity)
        self.choices = [0] * len(problem.tables)
        self.ranks: list[Ranks] = [np.empty(0, dtype=np.intp)] * len(problem.tables)
        # An option that fits on no empty rank is only tried for a table without other options.
        self.tried = [
            choices or list(range(len(problem.tables[table]))) for table, choices in enumerate(worth_trying(problem))
        ]

    def host_over(self, memory: Floats) -> Floats:
        hosts = memory.reshape(self.problem.num_hosts, self.problem.ranks_per_host, -1).sum(axis=1)
        return np.zeros_like(hosts) if self.caps is None else np.maximum(hosts - self.caps, 0.0)

    def excess(self, memory: Floats) -> float:
        return float(np.maximum(memory - self.problem.capacity, 0.0).sum() + self.host_over(memory).sum())

    def take(self, table: int) -> None:
        np.subtract.at(self.memory, self.ranks[table], self.problem.tables[table][self.choices[table]].memory)

    def place(self, table: int) -> None:
        best: tuple[float, float, int, Ranks] | None = None
        for choice in self.tried[table]:
            option = self.problem.tables[table][choice]
            ranks = self._ranks_for(option)
            ending = self.memory.copy()
            np.add.at(ending, ranks, option.memory)
            key = (self.excess(ending), float(option.memory.sum()))
            if best is None or key < best[:2]:
                best = (*key, choice, ranks)
        assert best is not None
        _, _, self.choices[table], self.ranks[table] = best
        np.add.at(self.memory, best[3], self.problem.tables[table][best[2]].memory)

    def _ranks_for(self, option: Option) -> Ranks:
        """Return the ranks with most free memory among those that the option's rule permits."""
        problem, local = self.problem, self.problem.ranks_per_host
        room = ((problem.capacity - self.memory) / np.maximum(problem.capacity.max(axis=0), 1.0))[
            :, option.memory.any(axis=0)
        ].sum(axis=1)
        by_host = room.reshape(-1, local).sum(axis=1).argsort(kind="stable")[::-1]
        if option.rule is Rule.EVERY_RANK:
            return np.arange(problem.world_size)
        if option.rule in (Rule.ONE_HOST, Rule.WHOLE_HOSTS):
            blocks = option.num_shards // local
            hosts = [int(by_host[block % len(by_host)]) for block in range(blocks)]
            return np.concatenate([np.arange(host * local, (host + 1) * local) for host in hosts])
        within = np.arange(problem.world_size)
        if option.rule is Rule.WITHIN_HOST:
            within = np.arange(by_host[0] * local, (by_host[0] + 1) * local)
        emptiest = within[room[within].argsort(kind="stable")[::-1]]
        return emptiest[np.arange(option.num_shards) % len(emptiest)]
