"""Track the tables and loads of each rank, and find the best placement of one more table."""

from __future__ import annotations

from collections import Counter

import numpy as np

from pipeline.planner.search.problem import Assignment, Floats, Option, Ranks, Rule, SearchProblem

# sharpness of the maxima, in units of one over the mean maximum, while tables are placed one by one
BLUNT = 30.0
LARGEST_EXPONENT = 300.0
TINY = 1e-12  # of a sum of exponentials; less is rounding after its largest part is subtracted


class RankState:
    """Hold the loads of all ranks under one objective, to place tables one by one.

    The value is a sum of maxima over ranks: of the total cost for max_rank, of each phase's cost
    for critical_path. Changes are compared by a smooth approximation of the value, the logarithm of
    a sum of exponentials, to which the second-largest load also contributes. `load` is [R, maxima].
    """

    def __init__(
        self,
        problem: SearchProblem,
        objective: str,
        scale_ms: float,
        memory_weight: float = 0.0,
        targets: Floats | None = None,
    ) -> None:
        """scale_ms: the approximate value. targets [maxima]: loads below these values cost little."""
        self.problem = problem
        self.objective = objective
        self.costs = [[project(option, objective) for option in options] for options in problem.tables]
        self.load = np.zeros((problem.world_size, self.costs[0][0].shape[1]))
        self.memory = np.zeros_like(problem.capacity)
        self.targets = np.zeros(self.load.shape[1]) if targets is None else targets
        self.choices: list[int | None] = [None] * len(problem.tables)
        self.ranks: list[Ranks] = [np.empty(0, dtype=np.intp)] * len(problem.tables)
        # Tables on every rank, or with a shard on one. Dicts have one order in all processes.
        self.everywhere: dict[int, None] = {}
        self.on_rank: list[dict[int, None]] = [{} for _ in range(problem.world_size)]
        self.free = FreeShards(problem, self.costs)
        self._kind_ms = problem.kind_ms
        self._kinds: Counter[str] = Counter()  # of the chosen options
        self._every_rank = np.arange(problem.world_size)
        self.host_caps = problem.host_caps
        # Milliseconds of a full rank compared with an empty one, if memory must be saved.
        self._saves_memory = memory_weight > 0
        self._memory_price = memory_weight / np.maximum(problem.capacity, 1.0) ** 2
        self.scale_ms = max(scale_ms, 1e-9)
        self.sharpen(BLUNT * self.load.shape[1])

    def sharpen(self, sharpness: float) -> None:
        self._per_ms = sharpness / self.scale_ms
        self._soft: Soft | None = None

    @property
    def value(self) -> float:
        return float(self.load.max(axis=0).sum()) + self._latency()

    @property
    def smooth_value(self) -> float:
        return self.soft.value + self._latency()

    @property
    def soft(self) -> Soft:
        if self._soft is None:
            self._soft = Soft(self.load, self.targets, self._per_ms)
        return self._soft

    def _latency(self) -> float:
        return sum(total for kind, total in self._kind_ms.items() if self._kinds[kind])

    def put(self, table: int, choice: int, ranks: Ranks) -> None:
        self._change(table, choice, ranks, 1.0)
        self._kinds[self.problem.tables[table][choice].kind] += 1
        self.choices[table], self.ranks[table] = choice, ranks
        self.free.lay(table, choice, ranks)
        for where in self._homes(table, choice, ranks):
            where[table] = None

    def take(self, table: int) -> None:
        choice = self.choices[table]
        assert choice is not None
        self._change(table, choice, self.ranks[table], -1.0)
        self._kinds[self.problem.tables[table][choice].kind] -= 1
        for where in self._homes(table, choice, self.ranks[table]):
            where.pop(table, None)
        self.free.lift(table)
        self.choices[table] = None

    def _homes(self, table: int, choice: int, ranks: Ranks) -> list[dict[int, None]]:
        if self.problem.tables[table][choice].rule is Rule.EVERY_RANK:
            return [self.everywhere]
        return [self.on_rank[rank] for rank in ranks]

    def _change(self, table: int, choice: int, ranks: Ranks, sign: float) -> None:
        cost, memory = self.costs[table][choice], self.problem.tables[table][choice].memory
        self._soft = None
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
        self.load[:], self.memory[:], self._soft = 0.0, 0.0, None
        self.choices = [None] * len(self.choices)
        self._kinds.clear()
        self.free.clear()
        for where in (self.everywhere, *self.on_rank):
            where.clear()

    def restore(self, assignment: Assignment) -> None:
        """Place the tables of an assignment again, so that the sums have no rounding errors from earlier steps."""
        self.clear()
        for table, (choice, ranks) in enumerate(zip(assignment.choices, assignment.ranks, strict=True)):
            self.put(table, choice, ranks)

    def find_placement(self, table: int, choice: int) -> tuple[Ranks, float] | None:
        """Return the best ranks that the option's rule permits, and `smooth_value` with the table on
        these ranks. Return None if the option does not fit.
        """
        option, cost = self.problem.tables[table][choice], self.costs[table][choice]
        if option.rule is Rule.ANY_RANK and option.num_shards == 1:
            return self._find_rank(option, cost)
        if option.rule is Rule.EVERY_RANK:
            fits = (self.memory + option.memory <= self.problem.capacity).all()
            ranks = self._every_rank if fits and self._hosts_hold(option, self._every_rank) else None
        elif option.rule is Rule.ONE_HOST or option.rule is Rule.WHOLE_HOSTS:
            return self._find_hosts(option, cost)
        elif option.rule is Rule.ANY_RANK:
            ranks = self._spread(option, cost, slice(None))
        else:
            ranks = self._find_within_host(option, cost)
        return None if ranks is None else (ranks, self._value_with(option, cost, ranks))

    def find_best(self, table: int) -> tuple[int, Ranks] | None:
        """Return the option and ranks that raise the smooth value least, or None if no option fits."""
        best: tuple[float, int, Ranks] | None = None
        for choice, option in enumerate(self.problem.tables[table]):
            found = self.find_placement(table, choice)
            if found is None:
                continue
            ranks, value = found
            if not self._kinds[option.kind]:
                value += self._kind_ms.get(option.kind, 0.0)
            if best is None or value < best[0]:
                best = (value, choice, ranks)
        return None if best is None else best[1:]

    def _value_with(self, option: Option, cost: Floats, ranks: Ranks) -> float:
        before = self.load[ranks]
        if option.rule in (Rule.ANY_RANK, Rule.WITHIN_HOST):  # several shards may share a rank
            ending = self.load.copy()
            np.add.at(ending, ranks, cost)
            value = float(self.soft.instead(self.soft.exponentials.sum(axis=0), ending))
        else:
            value = float(self.soft.instead(self.soft.exponentials[ranks].sum(axis=0), before + cost))
        if self._saves_memory:
            value += float(self._price(ranks, self.memory[ranks], option.memory).sum())
        return value

    def _price(self, ranks: Ranks | slice, taken: Floats, more: Floats) -> Floats:
        """Return [ranks]: the cost in ms of `more` memory on each rank, in addition to `taken`."""
        return (self._memory_price[ranks] * (2 * taken + more) * more).sum(axis=-1)

    def _hosts_hold(self, option: Option, ranks: Ranks) -> bool:
        if self.host_caps is None:
            return True
        taken = self.host_sums()
        np.add.at(taken, ranks // self.problem.ranks_per_host, option.memory)
        return bool((taken <= self.host_caps).all())

    def host_sums(self) -> Floats:
        """Return [hosts, M]: the bytes that are used on each host."""
        return self.memory.reshape(self.problem.num_hosts, self.problem.ranks_per_host, -1).sum(axis=1)

    def _find_rank(self, option: Option, cost: Floats) -> tuple[Ranks, float] | None:
        memory = self.memory + option.memory[0]
        prices = self.soft.instead(self.soft.exponentials, (self.load + cost[0])[:, None])
        if self._saves_memory:
            prices = prices + self._price(slice(None), self.memory, option.memory[0])
        prices[(memory > self.problem.capacity).any(axis=-1)] = np.inf
        if self.host_caps is not None:
            full = (self.host_sums() + option.memory[0] > self.host_caps).any(axis=1)
            prices[np.repeat(full, self.problem.ranks_per_host)] = np.inf
        rank = int(prices.argmin())
        return (np.array([rank]), float(prices[rank])) if np.isfinite(prices[rank]) else None

    def _spread(self, option: Option, cost: Floats, on: slice) -> Ranks | None:
        """Place shards one by one, each on the best of the ranks `on`. Return None if one does not fit."""
        load, memory, room = self.load.copy(), self.memory[on].copy(), self.problem.capacity[on]
        ranks, first = np.empty(option.num_shards, dtype=np.intp), on.start or 0
        for shard in np.argsort(-cost.sum(axis=1), kind="stable"):
            soft = Soft(load, self.targets, self._per_ms)
            prices = soft.instead(soft.exponentials[on], (load[on] + cost[shard])[:, None])
            needed = memory + option.memory[shard]
            if self._saves_memory:
                prices = prices + self._price(on, memory, option.memory[shard])
            prices[(needed > room).any(axis=-1)] = np.inf
            rank = int(prices.argmin())
            if not np.isfinite(prices[rank]):
                return None
            load[first + rank] += cost[shard]
            memory[rank] += option.memory[shard]
            ranks[shard] = rank
            if option.distinct_ranks:
                room = room.copy()
                room[rank] = -1.0
        ranks += first
        return ranks if self._hosts_hold(option, ranks) else None

    def _find_hosts(self, option: Option, cost: Floats) -> tuple[Ranks, float] | None:
        """Place each block of shards on a separate host, the best host that is not in use yet."""
        local, hosts = self.problem.ranks_per_host, self.problem.num_hosts
        blocks = option.num_shards // local
        uses, most = np.zeros(hosts, dtype=int), -(-blocks // hosts)
        load, soft = self.load.copy(), self.soft
        memory = self.memory.reshape(hosts, local, -1).copy()
        room, chosen = self.problem.capacity.reshape(hosts, local, -1), []
        for block in range(blocks):
            of_block = slice(block * local, (block + 1) * local)
            by_host = load.reshape(hosts, local, -1)
            ending, needed = by_host + cost[of_block], memory + option.memory[of_block]
            price = soft.instead(soft.exponentials.reshape(hosts, local, -1).sum(axis=1), ending)
            price[(needed > room).any(axis=(1, 2)) | (uses >= most)] = np.inf
            if self.host_caps is not None:
                price[(needed.sum(axis=1) > self.host_caps).any(axis=1)] = np.inf
            host = int(price.argmin())
            if not np.isfinite(price[host]):
                return None
            value = float(price[host])
            by_host[host], memory[host] = ending[host], needed[host]
            uses[host] += 1
            chosen.append(self._every_rank[host * local : (host + 1) * local])
            if blocks > 1:
                soft = Soft(load, self.targets, self._per_ms)
        ranks = np.concatenate(chosen)
        if self._saves_memory:
            value += float(self._price(ranks, self.memory[ranks], option.memory).sum())
        return ranks, value

    def _find_within_host(self, option: Option, cost: Floats) -> Ranks | None:
        local = self.problem.ranks_per_host
        by_load = np.argsort(self.load.reshape(self.problem.num_hosts, -1).sum(axis=1), kind="stable")
        for host in by_load:
            ranks = self._spread(option, cost, slice(int(host) * local, (int(host) + 1) * local))
            if ranks is not None:
                return ranks
        return None


class FreeShards:
    """Hold as arrays the shards that may be on any rank. Two ranks can exchange such shards.

    Every table has one row for each shard of its options with this rule. After these rows there is
    one empty row per rank; exchanging a shard with an empty row moves the shard. `ranks` is -1 if a
    row is not in use.
    """

    def __init__(self, problem: SearchProblem, costs: list[list[Floats]]) -> None:
        self._problem, self._costs = problem, costs
        counts = [
            max((option.num_shards for option in options if _is_free(option)), default=0) for options in problem.tables
        ]
        self.first = np.concatenate([[0], np.cumsum(counts)]).tolist()
        rows, size = self.first[-1], self.first[-1] + problem.world_size
        self.tables = np.repeat(np.arange(len(counts)), counts)
        self.cost = np.zeros((costs[0][0].shape[1], size))  # [maxima, rows]
        self.memory = np.zeros((size, problem.num_memories))
        self.ranks = np.concatenate([np.full(rows, -1), np.arange(problem.world_size)])
        self.num_rows = rows

    def clear(self) -> None:
        self.ranks[: self.num_rows] = -1

    def lay(self, table: int, choice: int, ranks: Ranks) -> None:
        option = self._problem.tables[table][choice]
        if _is_free(option):
            rows = slice(self.first[table], self.first[table] + option.num_shards)
            self.ranks[rows] = ranks
            self.cost[:, rows], self.memory[rows] = self._costs[table][choice].T, option.memory

    def lift(self, table: int) -> None:
        self.ranks[self.first[table] : self.first[table + 1]] = -1


def _is_free(option: Option) -> bool:
    return option.rule is Rule.ANY_RANK and not option.distinct_ranks


class Soft:
    """Hold the smooth value of loads [R, maxima], and compute its value if some loads change."""

    def __init__(self, load: Floats, targets: Floats, per_ms: float) -> None:
        """targets [maxima]: they count like the loads of one more rank."""
        self.highest: Floats = np.maximum(load.max(axis=0), targets)
        self.exponentials: Floats = np.exp(per_ms * (load - self.highest))  # [R, maxima]
        self.sums: Floats = self.exponentials.sum(axis=0) + np.exp(per_ms * (targets - self.highest))
        self._per_ms = per_ms
        self._constant = float(self.highest.sum())

    @property
    def value(self) -> float:
        return float((self.highest + np.log(self.sums) / self._per_ms).sum())

    def instead(self, gone: Floats, loads: Floats) -> Floats:
        """Return the smooth value [...] if loads with the exponentials `gone` become `loads` [..., ranks, maxima]."""
        beyond = self._per_ms * (loads - self.highest)
        remaining = np.maximum(self.sums - gone, TINY * self.sums)
        if beyond.max() < LARGEST_EXPONENT:
            total = remaining + np.exp(beyond).sum(axis=-2)
            return self._constant + np.log(total).sum(axis=-1) / self._per_ms
        shift = np.maximum(beyond.max(axis=-2), 0.0)
        total = remaining * np.exp(-shift) + np.exp(beyond - shift[..., None, :]).sum(axis=-2)
        return self._constant + (shift + np.log(total)).sum(axis=-1) / self._per_ms

    def exchanged(self, load: Floats, rank: int, there: Ranks, change: Floats) -> Floats:
        """Return the smooth value [...] if `change` [maxima, ...] moves from the ranks `there` to the rank `rank`."""
        lifted = (1,) * (change.ndim - 2)
        gone = self.exponentials[rank][:, None] + self.exponentials[there].T  # [maxima, there]
        remaining = np.maximum(self.sums[:, None] - gone, TINY * self.sums[:, None]).reshape(len(gone), *lifted, -1)
        change = change * self._per_ms
        own = self._per_ms * (load[rank] - self.highest)
        other = (self._per_ms * (load[there] - self.highest)).T.reshape(len(gone), *lifted, -1)
        with np.errstate(over="ignore"):
            total = np.exp(change + own.reshape(-1, *lifted, 1))
            total += np.exp(np.subtract(other, change, out=change), out=change)
            total += remaining
            return self._constant + np.log(total.prod(axis=0)) / self._per_ms


def project(option: Option, objective: str) -> Floats:
    """Return [S, maxima]: the costs of each shard that count in the objective's maxima over ranks."""
    return option.cost_ms.sum(axis=1, keepdims=True) if objective == "max_rank" else option.cost_ms


def fill(state: RankState, choices: list[int] | None, order: list[int]) -> bool:
    """Place all tables in `order`, with `choices` or, if they do not fit, with the best option.
    Return False if full.
    """
    for table in order:
        placement: tuple[int, Ranks] | None = None
        if choices is not None:
            found = state.find_placement(table, choices[table])
            placement = None if found is None else (choices[table], found[0])
        placement = placement or state.find_best(table)
        if placement is None:
            return False
        state.put(table, *placement)
    return True
