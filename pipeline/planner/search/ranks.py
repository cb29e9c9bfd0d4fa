"""Keep what lies on each rank, and find the best place for one more table."""

from __future__ import annotations

from collections import Counter

import numpy as np

from pipeline.planner.search.problem import Assignment, Floats, Option, Ranks, Rule, SearchProblem

EVEN_OUT = 1e-3  # weight of the ranks' sums beside the maxima: of equal places, the emptiest


class RankState:
    """Loads of all ranks under one objective, for placing tables one by one.

    Under either objective the value is a sum of maxima over ranks: of one whole cost for max_rank, of each
    phase's for critical_path. `load` is [R, maxima].
    """

    def __init__(
        self, problem: SearchProblem, objective: str, memory_weight: float = 0.0, targets: Floats | None = None
    ) -> None:
        """`targets` [maxima]: up to there a load costs nothing, only evenness counts."""
        self.problem = problem
        self.objective = objective
        self.costs = [[project(option, objective) for option in options] for options in problem.tables]
        self.load = np.zeros((problem.world_size, self.costs[0][0].shape[1]))
        self.memory = np.zeros((problem.world_size, 2))
        self.targets = np.zeros(self.load.shape[1]) if targets is None else targets
        self.choices: list[int | None] = [None] * len(problem.tables)
        self.ranks: list[Ranks] = [np.empty(0, dtype=np.intp)] * len(problem.tables)
        # Tables by where they lie: on every rank, or with a shard on one. Dicts, for they keep one order in every process.
        self.everywhere: dict[int, None] = {}
        self.on_rank: list[dict[int, None]] = [{} for _ in range(problem.world_size)]
        self._kind_ms = problem.kind_ms
        self._kinds: Counter[str] = Counter()  # of the chosen options
        self._every_rank = np.arange(problem.world_size)
        self._local = np.arange(problem.ranks_per_host)
        # Milliseconds that a rank's whole memory is worth, where placing must save memory too.
        self._saves_memory = memory_weight > 0
        self._memory_price = memory_weight / np.maximum(problem.capacity, 1.0)

    @property
    def value(self) -> float:
        latency = sum(total for kind, total in self._kind_ms.items() if self._kinds[kind])
        return float(self.load.max(axis=0).sum()) + latency

    @property
    def smooth_value(self) -> float:
        """The value, and a little of how uneven loads are: a step that only levels them counts as one forward."""
        return self.value + self._unevenness((self.load * self.load).sum(axis=0))

    def put(self, table: int, choice: int, ranks: Ranks) -> None:
        self._change(table, choice, ranks, 1.0)
        self._kinds[self.problem.tables[table][choice].kind] += 1
        self.choices[table], self.ranks[table] = choice, ranks
        for where in self._homes(table, choice, ranks):
            where[table] = None

    def take(self, table: int) -> None:
        choice = self.choices[table]
        assert choice is not None
        self._change(table, choice, self.ranks[table], -1.0)
        self._kinds[self.problem.tables[table][choice].kind] -= 1
        for where in self._homes(table, choice, self.ranks[table]):
            where.pop(table, None)
        self.choices[table] = None

    def _homes(self, table: int, choice: int, ranks: Ranks) -> list[dict[int, None]]:
        if self.problem.tables[table][choice].rule is Rule.EVERY_RANK:
            return [self.everywhere]
        return [self.on_rank[rank] for rank in ranks]

    def _change(self, table: int, choice: int, ranks: Ranks, sign: float) -> None:
        cost, memory = self.costs[table][choice], self.problem.tables[table][choice].memory
        if len(ranks) == 1:
            self.load[ranks[0]] += sign * cost[0]
            self.memory[ranks[0]] += sign * memory[0]
        else:
            np.add.at(self.load, ranks, sign * cost)
            np.add.at(self.memory, ranks, sign * memory)

    def assignment(self) -> Assignment:
        assert None not in self.choices
        return Assignment([choice for choice in self.choices if choice is not None], list(self.ranks))

    def clear(self) -> None:
        self.load[:], self.memory[:] = 0.0, 0.0
        self.choices = [None] * len(self.choices)
        self._kinds.clear()
        for where in (self.everywhere, *self.on_rank):
            where.clear()

    def restore(self, assignment: Assignment) -> None:
        """Start again from an assignment, with sums free of rounding left over from earlier steps."""
        self.clear()
        for table, (choice, ranks) in enumerate(zip(assignment.choices, assignment.ranks, strict=True)):
            self.put(table, choice, ranks)

    def find_place(self, table: int, choice: int) -> Ranks | None:
        """Ranks for the shards of an option by its rule, each where it costs least; None where it does not fit."""
        option, cost = self.problem.tables[table][choice], self.costs[table][choice]
        if option.rule is Rule.EVERY_RANK:
            fits = (self.memory + option.memory <= self.problem.capacity).all()
            return self._every_rank if fits and self._hosts_hold(option, self._every_rank) else None
        if option.rule is Rule.ONE_HOST or option.rule is Rule.WHOLE_HOSTS:
            return self._find_hosts(option, cost)
        if option.rule is Rule.ANY_RANK and option.num_shards == 1:
            return self._find_rank(option, cost)
        if option.rule is Rule.ANY_RANK:
            return self._spread(option, cost, slice(None))
        return self._find_within_host(option, cost)

    def find_best(self, table: int) -> tuple[int, Ranks] | None:
        """The option and place that raise the smooth value least; None where nothing fits."""
        best: tuple[float, int, Ranks] | None = None
        highest, squares = self._highest(), (self.load * self.load).sum(axis=0)
        for choice, cost in enumerate(self.costs[table]):
            ranks = self.find_place(table, choice)
            if ranks is None:
                continue
            before = self.load[ranks]
            after = before + cost
            value = float(np.maximum(highest, after.max(axis=0)).sum()) + self._unevenness(
                squares + (after * after - before * before).sum(axis=0)
            )
            if not self._kinds[kind := self.problem.tables[table][choice].kind]:
                value += self._kind_ms.get(kind, 0.0)
            if self._saves_memory:
                value += float((self._memory_price[ranks] * self.problem.tables[table][choice].memory).sum())
            if best is None or value < best[0]:
                best = (value, choice, ranks)
        return None if best is None else best[1:]

    def _highest(self) -> Floats:
        highest: Floats = np.maximum(self.load.max(axis=0), self.targets)
        return highest

    def _unevenness(self, squares: Floats) -> float:
        return EVEN_OUT * float(np.sqrt(squares / len(self.load)).sum())

    def _hosts_hold(self, option: Option, ranks: Ranks) -> bool:
        caps = self.problem.host_memory
        if caps is None:
            return True
        taken = self.memory[:, 1].reshape(len(caps), -1).sum(axis=1)
        np.add.at(taken, ranks // self.problem.ranks_per_host, option.memory[:, 1])
        return bool((taken <= caps).all())

    def _prices(self, load: Floats, memory: Floats, room: Floats, on: slice) -> Floats:
        """For each rank of `on`: what it would cost to end with `load` and `memory`; infinite beyond `room`."""
        highest = self._highest()
        weights = EVEN_OUT / (highest + 1e-9)
        before = self.load[on]
        price = np.maximum(load, highest).sum(axis=-1) + ((load * load - before * before) * weights).sum(axis=-1)
        if self._saves_memory:
            price = price + (self._memory_price[on] * memory).sum(axis=-1)
        return np.where((memory <= room).all(axis=-1), price, np.inf)

    def _find_rank(self, option: Option, cost: Floats) -> Ranks | None:
        memory = self.memory + option.memory[0]
        prices = self._prices(self.load + cost[0], memory, self.problem.capacity, slice(None))
        caps = self.problem.host_memory
        if caps is not None:
            hosts = self.memory[:, 1].reshape(len(caps), -1).sum(axis=1) + option.memory[0, 1]
            prices[np.repeat(hosts > caps, self.problem.ranks_per_host)] = np.inf
        rank = int(prices.argmin())
        return np.array([rank]) if np.isfinite(prices[rank]) else None

    def _spread(self, option: Option, cost: Floats, on: slice) -> Ranks | None:
        """Shards one after another on the ranks of `on`, each on the best; None where one does not fit."""
        load, memory, room = self.load[on].copy(), self.memory[on].copy(), self.problem.capacity[on]
        ranks = np.empty(option.num_shards, dtype=np.intp)
        for shard in np.argsort(-cost.sum(axis=1), kind="stable"):
            prices = self._prices(load + cost[shard], memory + option.memory[shard], room, on)
            rank = int(prices.argmin())
            if not np.isfinite(prices[rank]):
                return None
            load[rank] += cost[shard]
            memory[rank] += option.memory[shard]
            ranks[shard] = rank
            if option.distinct_ranks:
                room = room.copy()
                room[rank] = -1.0
        ranks += on.start or 0
        return ranks if self._hosts_hold(option, ranks) else None

    def _find_hosts(self, option: Option, cost: Floats) -> Ranks | None:
        """Whole hosts, one a block of shards, each on the best of those not yet taken."""
        local, hosts = self.problem.ranks_per_host, self.problem.num_hosts
        blocks = option.num_shards // local
        uses, most = np.zeros(hosts, dtype=int), -(-blocks // hosts)
        highest = self._highest()
        weights = EVEN_OUT / (highest + 1e-9)
        load = self.load.reshape(hosts, local, -1).copy()
        memory = self.memory.reshape(hosts, local, 2).copy()
        room, chosen = self.problem.capacity.reshape(hosts, local, 2), []
        for block in range(blocks):
            mine = slice(block * local, (block + 1) * local)
            ending, needed = load + cost[mine], memory + option.memory[mine]
            price = np.maximum(ending.max(axis=1), highest).sum(axis=1)
            price += ((ending * ending - load * load).sum(axis=1) * weights).sum(axis=1)
            price[(needed > room).any(axis=(1, 2)) | (uses >= most)] = np.inf
            if self.problem.host_memory is not None:
                price[needed[:, :, 1].sum(axis=1) > self.problem.host_memory] = np.inf
            host = int(price.argmin())
            if not np.isfinite(price[host]):
                return None
            load[host], memory[host] = ending[host], needed[host]
            uses[host] += 1
            chosen.append(host * local + self._local)
        return np.concatenate(chosen)

    def _find_within_host(self, option: Option, cost: Floats) -> Ranks | None:
        local = self.problem.ranks_per_host
        by_load = np.argsort(self.load.reshape(self.problem.num_hosts, -1).sum(axis=1), kind="stable")
        for host in by_load:
            ranks = self._spread(option, cost, slice(int(host) * local, (int(host) + 1) * local))
            if ranks is not None:
                return ranks
        return None


def project(option: Option, objective: str) -> Floats:
    """[S, maxima]: the costs whose maxima over ranks the objective sums."""
    return option.cost_ms.sum(axis=1, keepdims=True) if objective == "max_rank" else option.cost_ms


def fill(state: RankState, choices: list[int] | None, order: list[int]) -> bool:
    """Place all tables in `order`, by `choices` or wherever best; a choice that does not fit gives way. False: no room."""
    for table in order:
        place: tuple[int, Ranks] | None = None
        if choices is not None:
            ranks = state.find_place(table, choices[table])
            place = None if ranks is None else (choices[table], ranks)
        place = place or state.find_best(table)
        if place is None:
            return False
        state.put(table, *place)
    return True
