"""Try the proposals of TorchRec's planner on arrays, so that a search is never worse than TorchRec.

The order of proposals (grid search, greedy by the largest shard, greedy by the sum, uniform) and
the placement (GreedyPerfPartitioner, sorted by storage) are the same as in
torchrec.distributed.planner, but run hundreds of times faster. If there are more proposals than the
budget allows, half of the budget is used for the first proposals, which TorchRec also reaches
within its timeout, and half for every n-th proposal of the two greedy searches.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.planner.search.problem import Assignment, Floats, Option, Ranks, Rule, Score, SearchProblem, score

MAX_GRID_PROPOSALS = 10_000  # TorchRec's limit; with more, the grid search is skipped
Proposal = list[int]  # for each table the index of an option


@dataclass(frozen=True, eq=False)
class TorchRecResult:
    """`chosen`: the plan that TorchRec takes, the first with the lowest max_rank. `best`: the best by our objective."""

    chosen: Assignment | None
    best: Assignment | None
    complete: bool


def try_proposals(problem: SearchProblem, objective: str, budget: int, stop: Callable[[], bool]) -> TorchRecResult:
    """Place each proposal as TorchRec does. `budget`: the number of placements. `stop` is called between proposals."""
    partitioner = _Partitioner(problem)
    walks, complete = _walks(partitioner, budget)
    seen: set[tuple[int, ...]] = set()
    chosen: tuple[float, Assignment] | None = None
    best: tuple[Score, Assignment] | None = None
    for proposal in itertools.chain(*walks):
        key = tuple(proposal)
        if key in seen:
            continue
        seen.add(key)
        if stop():
            complete = False
            break
        placed = partitioner.place(proposal)
        if placed is None:
            continue
        assignment, slowest = placed
        if chosen is None or slowest < chosen[0]:
            chosen = (slowest, assignment)
        value = score(problem, assignment)
        if best is None or value.of(objective) < best[0].of(objective):
            best = (value, assignment)
    return TorchRecResult(chosen and chosen[1], best and best[1], complete)


def _walks(partitioner: _Partitioner, budget: int) -> tuple[list[Iterator[Proposal]], bool]:
    """Return the sequences of proposals in TorchRec's order, and whether all sequences are complete."""
    tables = partitioner.offered
    grid = math.prod(len(options) for options in tables)
    walks: list[Iterator[Proposal]] = []
    complete = True
    allowed = max(1, budget // partitioner.placements)
    if grid <= MAX_GRID_PROPOSALS:
        by_depth = [partitioner.sorted_options(table, by_largest=True) for table in range(len(tables))]
        proposals = (list(proposal) for proposal in itertools.product(*by_depth))
        walks.append(itertools.islice(proposals, allowed))
        complete = grid <= allowed
    steps = 1 + sum(len(options) - 1 for options in tables)
    stride = -(-2 * steps // allowed)
    complete = complete and stride == 1
    if stride > 1:
        stride = -(-4 * steps // allowed)
        walks.append(itertools.islice(_greedy_walk(partitioner, by_largest=True), allowed // 2))
    for by_largest in (True, False):
        walks.append(itertools.islice(_greedy_walk(partitioner, by_largest), 0, None, stride))
    walks.append(_uniform_proposals(partitioner))
    return walks, complete


def _greedy_walk(partitioner: _Partitioner, by_largest: bool) -> Iterator[Proposal]:
    """Start with the cheapest options. In each step change the option of the table whose shards use most memory."""
    order = [partitioner.sorted_options(table, by_largest) for table in range(len(partitioner.offered))]
    position = [0] * len(order)

    def entry(table: int) -> tuple[float, float, float, float, int]:
        most, total = partitioner.extent[table][order[table][position[table]]]
        return (-most[0], -total[0], -most[1], -total[1], table)

    # TorchRec takes the first of the largest, and stops if the rest uses no memory at all.
    heap = [entry(table) for table in range(len(order)) if len(order[table]) > 1]
    heapq.heapify(heap)
    yield [options[0] for options in order]
    while heap and any(value < 0 for value in heap[0][:4]):
        table = heapq.heappop(heap)[-1]
        position[table] += 1
        if position[table] + 1 < len(order[table]):
            heapq.heappush(heap, entry(table))
        yield [options[position[index]] for index, options in enumerate(order)]


def _uniform_proposals(partitioner: _Partitioner) -> Iterator[Proposal]:
    """Propose one sharding type for all tables, each with its cheapest kernel."""
    tables = partitioner.problem.tables
    kinds = dict.fromkeys(
        tables[table][choice].kind for table, options in enumerate(partitioner.offered) for choice in options
    )
    order = [partitioner.sorted_options(table, by_largest=True) for table in range(len(tables))]
    for kind in kinds:
        cheapest = [
            [choice for choice in options if tables[table][choice].kind == kind] for table, options in enumerate(order)
        ]
        if all(cheapest):
            yield [options[0] for options in cheapest]


class _Partitioner:
    """Do on arrays what GreedyPerfPartitioner does: place uniform options first, then the others, the largest first."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.offered = [
            [index for index, option in enumerate(options) if option.proposed] for options in problem.tables
        ]
        self.costs: list[list[Floats]] = [
            [option.cost_ms.sum(axis=1) for option in options] for options in problem.tables
        ]
        # At most: shards of one table that share their ranks are placed at once.
        one_by_one = (Rule.ANY_RANK, Rule.WITHIN_HOST)
        self.placements = sum(
            max(option.num_shards if option.rule in one_by_one else 1 for option in options)
            for options in problem.tables
        )
        self.extent = [
            [(tuple(option.memory.max(axis=0)), tuple(option.memory.sum(axis=0))) for option in options]
            for options in problem.tables
        ]

    def sorted_options(self, table: int, by_largest: bool) -> list[int]:
        costs = self.costs[table]
        return sorted(
            self.offered[table], key=lambda choice: costs[choice].max() if by_largest else sum(costs[choice].tolist())
        )

    def place(self, proposal: Proposal) -> tuple[Assignment, float] | None:
        """Return the assignment and the slowest rank's cost, or None if TorchRec finds no placement."""
        problem = self.problem
        load, room = np.zeros(problem.world_size), problem.capacity.copy()
        ranks: list[Ranks | None] = [None] * len(proposal)
        every = np.arange(problem.world_size)
        others = []
        for table, choice in enumerate(proposal):
            option = problem.tables[table][choice]
            if option.rule is Rule.EVERY_RANK:
                load += self.costs[table][choice]
                room -= option.memory
                ranks[table] = every
            else:
                others.append(table)
        if (room < 0).any():
            return None
        others.sort(key=lambda table: self.extent[table][proposal[table]][1], reverse=True)
        heap: list[tuple[float, int, int]] | None = None
        for table in others:
            choice = proposal[table]
            option, costs = problem.tables[table][choice], self.costs[table][choice]
            if option.rule is Rule.ANY_RANK:
                heap = heap or _heap(load, range(problem.world_size), problem.ranks_per_host)
                ranks[table] = _on_emptiest(option, costs, heap, load, room)
            else:
                heap = None
                ranks[table] = self._on_hosts(option, costs, load, room)
            if ranks[table] is None:
                return None
        assignment = Assignment(list(proposal), [of_table for of_table in ranks if of_table is not None])
        return assignment, float(load.max())

    def _on_hosts(self, option: Option, costs: Floats, load: Floats, room: Floats) -> Ranks | None:
        problem, local = self.problem, self.problem.ranks_per_host
        by_load = np.argsort(load.reshape(problem.num_hosts, local).sum(axis=1), kind="stable")
        hosts = [np.arange(host * local, (host + 1) * local) for host in by_load]
        if option.rule is Rule.WHOLE_HOSTS:
            return _on_a_run_of_hosts(option, costs, load, room, hosts)
        for host in hosts:
            if (option.memory.sum(axis=0) > room[host].sum(axis=0)).any():
                continue
            if option.rule is Rule.WITHIN_HOST:
                trial_load, trial_room = load.copy(), room.copy()
                heap = _heap(trial_load, host.tolist(), local)
                found = _on_emptiest(option, costs, heap, trial_load, trial_room)
                if found is not None:
                    load[:], room[:] = trial_load, trial_room
                    return found
            elif (option.memory <= room[host]).all():
                load[host] += costs
                room[host] -= option.memory
                return host
        return None


def _heap(load: Floats, ranks: range | list[int], ranks_per_host: int) -> list[tuple[float, int, int]]:
    heap = [(float(load[rank]), rank % ranks_per_host, rank) for rank in ranks]
    heapq.heapify(heap)
    return heap


def _on_emptiest(
    option: Option, costs: Floats, heap: list[tuple[float, int, int]], load: Floats, room: Floats
) -> Ranks | None:
    """Place each shard on the heap's least loaded rank with enough memory. Update `heap`, `load` and `room`."""
    chosen: list[int] = []
    for cost, memory in zip(costs.tolist(), option.memory, strict=True):
        passed = []
        while heap:
            _, local, rank = heap[0]
            if (memory <= room[rank]).all() and not (option.distinct_ranks and rank in chosen):
                room[rank] -= memory
                load[rank] += cost
                heapq.heapreplace(heap, (float(load[rank]), local, rank))
                chosen.append(rank)
                break
            passed.append(heapq.heappop(heap))
        else:
            return None
        for entry in passed:
            heapq.heappush(heap, entry)
    return np.array(chosen)


def _on_a_run_of_hosts(option: Option, costs: Floats, load: Floats, room: Floats, hosts: list[Ranks]) -> Ranks | None:
    """Place the shards on the first adjacent `hosts` with enough memory. Return the ranks."""
    wanted = option.num_shards // len(hosts[0])
    if wanted >= len(hosts):
        runs = [[hosts[index % len(hosts)] for index in range(wanted)]]
    else:
        runs = [hosts[start : start + wanted] for start in range(len(hosts) - wanted + 1)]
    for run in runs:
        ranks = np.concatenate(run)
        needed = np.zeros_like(room)
        np.add.at(needed, ranks, option.memory)
        if (needed <= room).all():
            np.add.at(load, ranks, costs)
            room -= needed
            return ranks
    return None
