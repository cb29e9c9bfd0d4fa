"""Anneal an assignment: a kernel, compiled by Numba, that tries some million changes per second.

A change affects one or two tables. It is accepted or rejected by a potential, which is the sum of a
smooth approximation of each maximum over ranks (the logarithm of a sum of exponentials), the
latency of kinds in use, and a cost for memory beyond the capacities. annealing.py documents the
shapes of the arrays.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.parts import part
from pipeline.planner.search.problem import Rule

U, int64 = np.uint64, np.int64
EVERY_RANK, ANY_RANK, ONE_HOST, WITHIN_HOST, WHOLE_HOSTS = range(len(Rule))
# the change whose number is below this one; otherwise two tables exchange options
SWAP, MOVE, SHARD_OTHERWISE = 0.45, 0.70, 0.90
ALIKE = 0.7  # share of the swaps between tables of similar cost
TINY = 1e-9  # of a sum of powers; less may be rounding after its largest part is subtracted
LEAST = 1e-50  # smallest factor of a sum
LARGEST_EXPONENT = 300.0
LOOK_EVERY = 256  # moves between checks whether the assignment is the best so far


@part()
def _random(seed):  # type: ignore[no-untyped-def]
    """Return a random number in [0, 1), by splitmix64."""
    seed[0] += U(0x9E3779B97F4A7C15)
    mixed = seed[0]
    mixed = (mixed ^ (mixed >> U(30))) * U(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> U(27))) * U(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> U(31))
    return float(mixed >> U(11)) * (1.0 / 9007199254740992.0)


@part()
def _below(count, seed):  # type: ignore[no-untyped-def]
    return int64(_random(seed) * count)


@part()
def _num_shards(option, packed):  # type: ignore[no-untyped-def]
    return packed.first_shard[option + 1] - packed.first_shard[option]


@part()
def _weigh(laid):  # type: ignore[no-untyped-def]
    """Compute the share of each rank in the smooth maxima."""
    for rank in range(len(laid.load)):
        weight = 0.0
        for maximum in range(len(laid.sums)):
            weight += laid.powers[rank, maximum] / laid.sums[maximum]
        laid.weights[rank] = weight


@part()
def _is_free(option, packed):  # type: ignore[no-untyped-def]
    return packed.rule[option] == ANY_RANK or packed.rule[option] == WITHIN_HOST


@part()
def _keep(index, table, change, laid, packed):  # type: ignore[no-untyped-def]
    """Begin a change with the current option and ranks of a table."""
    option = laid.choices[table]
    change.tables[index] = table
    change.choices[index] = option
    for shard in range(_num_shards(option, packed)):
        change.ranks[index, shard] = laid.ranks[table, shard]


@part()
def _may_lie(index, change, packed, local):  # type: ignore[no-untyped-def]
    """Return whether the ranks of an option with free shards follow the option's rule."""
    option = change.choices[index]
    count = _num_shards(option, packed)
    if count == 1 or not _is_free(option, packed):
        return True
    for shard in range(count):
        rank = change.ranks[index, shard]
        if packed.rule[option] == WITHIN_HOST and rank // local != change.ranks[index, 0] // local:
            return False
        if packed.distinct[option]:
            for other in range(shard):
                if change.ranks[index, other] == rank:
                    return False
    return True


@part()
def _draw_ranks(index, change, packed, local, seed):  # type: ignore[no-untyped-def]
    """Sample ranks that the option's rule permits."""
    option = change.choices[index]
    count, world, rule = _num_shards(option, packed), len(packed.capacity), packed.rule[option]
    first = _below(world // local, seed) * local
    for shard in range(count):
        if rule == EVERY_RANK:
            rank = shard
        elif rule == ANY_RANK:
            rank = _below(world, seed)
        elif rule == WITHIN_HOST:
            rank = first + _below(local, seed)
        else:  # complete hosts, one after another
            rank = (first + shard) % world
        change.ranks[index, shard] = rank


@part()
def _free_shard(index, change, laid, packed, seed):  # type: ignore[no-untyped-def]
    """Sample two tables, keep the one on the slower rank, and choose a shard; -1 if no shard is free."""
    best, best_shard, best_weight = int64(-1), int64(-1), -1.0
    for _ in range(2 - index):
        table = _below(len(laid.choices), seed)
        option = laid.choices[table]
        if _is_free(option, packed):
            shard = _below(_num_shards(option, packed), seed)
            weight = laid.weights[laid.ranks[table, shard]]
            if weight > best_weight:
                best, best_shard, best_weight = table, shard, weight
    if best >= 0:
        _keep(index, best, change, laid, packed)
    return best_shard


@part()
def _shard_alike(change, laid, packed, seed):  # type: ignore[no-untyped-def]
    """Choose a free shard of a table that is similar to the first table of the change; -1 if no shard is free."""
    table = packed.alike[change.tables[0], _below(packed.alike.shape[1], seed)]
    option = laid.choices[table]
    if not _is_free(option, packed):
        return int64(-1)
    _keep(1, table, change, laid, packed)
    return _below(_num_shards(option, packed), seed)


@part()
def _swap(change, laid, packed, local, seed):  # type: ignore[no-untyped-def]
    """Swap the ranks of two free shards. Some swaps are between similar tables, because loads then change little."""
    one = _free_shard(0, change, laid, packed, seed)
    if one >= 0 and packed.alike.shape[1] > 0 and _random(seed) < ALIKE:
        other = _shard_alike(change, laid, packed, seed)
    else:
        other = _free_shard(1, change, laid, packed, seed)
    if one < 0 or other < 0 or change.tables[0] == change.tables[1]:
        return False
    rank, there = change.ranks[0, one], change.ranks[1, other]
    change.ranks[0, one], change.ranks[1, other] = there, rank
    change.counts[0] = 2
    return rank != there and _may_lie(0, change, packed, local) and _may_lie(1, change, packed, local)


@part()
def _move(change, laid, packed, local, seed):  # type: ignore[no-untyped-def]
    """Move a free shard to the less loaded of two sampled ranks."""
    shard = _free_shard(0, change, laid, packed, seed)
    if shard < 0:
        return False
    rank, other = _below(len(laid.load), seed), _below(len(laid.load), seed)
    if laid.weights[other] < laid.weights[rank]:
        rank = other
    if rank == change.ranks[0, shard]:
        return False
    change.ranks[0, shard] = rank
    change.counts[0] = 1
    return _may_lie(0, change, packed, local)


@part()
def _shard_otherwise(change, laid, packed, local, seed):  # type: ignore[no-untyped-def]
    """Change the option or the host of a table."""
    table = _below(len(laid.choices), seed)
    first, last = packed.first_option[table], packed.first_option[table + 1]
    option = first + _below(last - first, seed)
    rule = packed.rule[option]
    if option == laid.choices[table] and rule in (EVERY_RANK, ANY_RANK):
        return False
    change.tables[0], change.choices[0], change.counts[0] = table, option, 1
    _draw_ranks(0, change, packed, local, seed)
    return _may_lie(0, change, packed, local)


@part()
def _exchange(change, laid, packed, seed):  # type: ignore[no-untyped-def]
    """Exchange the options and ranks of two tables."""
    one, other = _below(len(laid.choices), seed), _below(len(laid.choices), seed)
    if packed.key[laid.choices[one]] == packed.key[laid.choices[other]]:
        return False
    change.tables[0], change.tables[1], change.counts[0] = one, other, 2
    for index in range(2):
        table, like = (one, other) if index == 0 else (other, one)
        first = packed.first_option[table]
        count = packed.first_option[table + 1] - first
        start, found = _below(count, seed), int64(-1)
        for step in range(count):
            option = first + (start + step) % count
            if packed.key[option] == packed.key[laid.choices[like]]:
                found = option
                break
        if found < 0:
            return False
        change.choices[index] = found
        for shard in range(_num_shards(found, packed)):
            change.ranks[index, shard] = laid.ranks[like, shard]
    return True


@part()
def _propose(change, laid, packed, local, seed):  # type: ignore[no-untyped-def]
    kind = _random(seed)
    if kind < SWAP:
        return _swap(change, laid, packed, local, seed)
    if kind < MOVE:
        return _move(change, laid, packed, local, seed)
    if kind < SHARD_OTHERWISE:
        return _shard_otherwise(change, laid, packed, local, seed)
    return _exchange(change, laid, packed, seed)


@part()
def _lay(option, ranks, sign, change, packed, local):  # type: ignore[no-untyped-def]
    """Add the loads of an option's shards to their ranks, or subtract them."""
    first = packed.first_shard[option]
    for shard in range(_num_shards(option, packed)):
        rank = ranks[shard]
        host = rank // local
        if not change.is_touched[rank]:
            change.is_touched[rank] = 1
            change.touched[change.counts[1]] = rank
            change.counts[1] += 1
        if not change.is_host[host]:
            change.is_host[host] = 1
            change.hosts[change.counts[2]] = host
            change.counts[2] += 1
        for maximum in range(packed.cost.shape[1]):
            change.load[rank, maximum] += sign * packed.cost[first + shard, maximum]
        for tier in range(packed.memory.shape[1]):
            change.memory[rank, tier] += sign * packed.memory[first + shard, tier]
            change.host_memory[host, tier] += sign * packed.memory[first + shard, tier]
    if packed.kind[option] >= 0:
        change.used[packed.kind[option]] += int64(sign)


@part()
def _more_over(change, laid, packed):  # type: ignore[no-untyped-def]
    """Return how many more bytes are beyond the capacities after the change."""
    more = 0.0
    for tier in range(packed.memory.shape[1]):
        for index in range(change.counts[1]):
            rank = change.touched[index]
            room = packed.capacity[rank, tier] - laid.memory[rank, tier]
            more += max(change.memory[rank, tier] - room, 0.0) - max(-room, 0.0)
        for index in range(change.counts[2]):
            host = change.hosts[index]
            room = packed.host_capacity[host, tier] - laid.host_memory[host, tier]
            more += max(change.host_memory[host, tier] - room, 0.0) - max(-room, 0.0)
    return more


@part()
def _later(change, laid, packed):  # type: ignore[no-untyped-def]
    """Return how many milliseconds of latency the change adds."""
    latency = 0.0
    for kind in range(len(packed.latency)):
        before, after = laid.used[kind] > 0, laid.used[kind] + change.used[kind] > 0
        latency += packed.latency[kind] * (int64(after) - int64(before))
    return latency


@part()
def _least_ratios(change, laid):  # type: ignore[no-untyped-def]
    """Compute a lower limit of each sum's factor, as if changed ranks had no load. Return the product."""
    product = 1.0
    for maximum in range(len(laid.sums)):
        left = laid.sums[maximum]
        for index in range(change.counts[1]):
            left -= laid.powers[change.touched[index], maximum]
        change.least[maximum] = max(left / laid.sums[maximum], LEAST)
        product *= change.least[maximum]
    return product


@part()
def _rises_less(change, laid, most_ms, per_ms):  # type: ignore[no-untyped-def]
    """Return whether the smooth maxima rise by at most `most_ms`. Stop computing when the answer is clear."""
    if most_ms * per_ms < -LARGEST_EXPONENT:
        return False
    most, ratio = math.exp(min(most_ms * per_ms, LARGEST_EXPONENT)), _least_ratios(change, laid)
    for maximum in range(len(laid.sums)):
        total = laid.sums[maximum]
        for index in range(change.counts[1]):
            rank = change.touched[index]
            beyond = laid.load[rank, maximum] + change.load[rank, maximum] - laid.highest[maximum]
            power = math.exp(min(per_ms * beyond, LARGEST_EXPONENT))
            change.powers[rank, maximum] = power
            total += power - laid.powers[rank, maximum]
        # the largest part was subtracted, so the rest is rounding
        if total < TINY * laid.sums[maximum]:
            total = 0.0
            for rank in range(len(laid.load)):
                total += change.powers[rank, maximum] if change.is_touched[rank] else laid.powers[rank, maximum]
        change.sums[maximum] = total
        ratio *= min(max(total / laid.sums[maximum], LEAST), 1.0 / LEAST) / change.least[maximum]
        if ratio > most:
            return False
    return True


@part()
def _count_from_highest(maximum, laid, per_ms):  # type: ignore[no-untyped-def]
    highest, total = 0.0, 0.0
    for rank in range(len(laid.load)):
        highest = max(highest, laid.load[rank, maximum])
    for rank in range(len(laid.load)):
        laid.powers[rank, maximum] = math.exp(per_ms * (laid.load[rank, maximum] - highest))
        total += laid.powers[rank, maximum]
    laid.highest[maximum], laid.sums[maximum] = highest, total


@part()
def _accept(change, laid, more_over, packed, per_ms):  # type: ignore[no-untyped-def]
    for index in range(change.counts[0]):
        table, option = change.tables[index], change.choices[index]
        laid.choices[table] = option
        for shard in range(_num_shards(option, packed)):
            laid.ranks[table, shard] = change.ranks[index, shard]
    for maximum in range(len(laid.sums)):
        laid.sums[maximum] = change.sums[maximum]
        for index in range(change.counts[1]):
            rank = change.touched[index]
            laid.load[rank, maximum] += change.load[rank, maximum]
            laid.powers[rank, maximum] = change.powers[rank, maximum]
    for tier in range(packed.memory.shape[1]):
        for index in range(change.counts[1]):
            laid.memory[change.touched[index], tier] += change.memory[change.touched[index], tier]
        for index in range(change.counts[2]):
            laid.host_memory[change.hosts[index], tier] += change.host_memory[change.hosts[index], tier]
    for kind in range(len(packed.latency)):
        laid.used[kind] += change.used[kind]
    laid.over[0] += more_over
    for maximum in range(len(laid.sums)):
        if not LEAST < laid.sums[maximum] < 1.0 / LEAST:
            _count_from_highest(maximum, laid, per_ms)


@part()
def _clear_row(table, row):  # type: ignore[no-untyped-def]
    """Set a row to 0. Numba compiles an assignment to a slice with the text of its error, for seconds."""
    for column in range(table.shape[1]):
        table[row, column] = 0.0


@part()
def _forget(change):  # type: ignore[no-untyped-def]
    for index in range(change.counts[1]):
        rank = change.touched[index]
        change.is_touched[rank] = 0
        _clear_row(change.load, rank)
        _clear_row(change.memory, rank)
    for index in range(change.counts[2]):
        change.is_host[change.hosts[index]] = 0
        _clear_row(change.host_memory, change.hosts[index])
    for kind in range(len(change.used)):
        change.used[kind] = 0
    for index in range(len(change.counts)):
        change.counts[index] = 0


@part()
def _value(laid, packed):  # type: ignore[no-untyped-def]
    """Return the milliseconds of the objective itself, without smoothing."""
    value = 0.0
    for maximum in range(len(laid.sums)):
        highest = 0.0
        for rank in range(len(laid.load)):
            highest = max(highest, laid.load[rank, maximum])
        value += highest
    for kind in range(len(packed.latency)):
        if laid.used[kind] > 0:
            value += packed.latency[kind]
    return value


@njit(nogil=True, cache=True)
def anneal(packed, laid, best_choices, best_ranks, change, local, moves, heat, seed, best):  # type: ignore[no-untyped-def]
    """Anneal `laid` in place. `best` [1]: value of `best_choices` and `best_ranks`. Return how many
    changes were accepted.

    heat: the exponents' factor (1/ms), the temperature (ms), the cost of a byte beyond capacities
    (ms).
    """
    per_ms, temperature, per_byte = heat
    taken = 0
    for number in range(moves):
        if number % LOOK_EVERY == 0:
            _weigh(laid)
            if laid.over[0] <= 0.0 and _value(laid, packed) < best[0]:
                best[0] = _value(laid, packed)
                for table in range(len(best_choices)):
                    best_choices[table] = laid.choices[table]
                    for shard in range(best_ranks.shape[1]):
                        best_ranks[table, shard] = laid.ranks[table, shard]
        change.counts[0] = 0
        if not _propose(change, laid, packed, local, seed):
            continue
        for index in range(change.counts[0]):
            table = change.tables[index]
            _lay(laid.choices[table], laid.ranks[table], -1.0, change, packed, local)
            _lay(change.choices[index], change.ranks[index], 1.0, change, packed, local)
        more_over = _more_over(change, laid, packed)
        most_ms = -temperature * math.log(1.0 - _random(seed)) - per_byte * more_over - _later(change, laid, packed)
        if _rises_less(change, laid, most_ms, per_ms):
            _accept(change, laid, more_over, packed, per_ms)
            taken += 1
        _forget(change)
    return taken
