"""Find the most valuable pattern of a rank: branch and bound over a knapsack of several resources,
compiled by Numba.

The arrays are those of patterns.py: options in the order of branching, with the capacity of every
resource scaled to 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.parts import part
from pipeline.planner.search.problem import Floats, Ranks

ROUNDING = 1e-9  # of a capacity; an excess of this size still fits


class Candidates(NamedTuple):
    """Hold the options as arrays: O options, K resources, G groups of equal tables."""

    price: Floats  # [O] of a shard
    use: Floats  # [O, K] of each resource by a shard
    surrogate: Floats  # [O] weighted mean of `use`
    most: Floats  # [O] shards on a rank
    group: Ranks  # [O]
    part: Floats  # [O] of a table, by a shard
    copies: Floats  # [G] tables
    by_worth: Ranks  # [O] options by price for their surrogate use, dearest first


@part()
def _fitting(option, depth, left, groups_left, candidates):  # type: ignore[no-untyped-def]
    """Return how many shards of an option still fit."""
    group = candidates.group[option]
    count = min(candidates.most[option], math.floor((groups_left[group] + ROUNDING) / candidates.part[option]))
    for resource in range(candidates.use.shape[1]):
        use = candidates.use[option, resource]
        if use > 0.0 and count * use > left[depth, resource] + ROUNDING:
            count = math.floor((left[depth, resource] + ROUNDING) / use)
    return max(count, 0.0)


@part()
def _most_worth(depth, left, surrogate_left, candidates):  # type: ignore[no-untyped-def]
    """Return an upper bound of the value that options from `depth` on can add. They share one
    surrogate resource, and shards may be split into parts.
    """
    worth, room = 0.0, surrogate_left
    for option in candidates.by_worth:
        if option < depth:
            continue
        fits = True
        for resource in range(candidates.use.shape[1]):
            if candidates.use[option, resource] > left[depth, resource] + ROUNDING:
                fits = False
                break
        if not fits:
            continue
        most, use = candidates.most[option], candidates.surrogate[option]
        if most * use > room:
            return worth + room / use * candidates.price[option]
        worth += most * candidates.price[option]
        room -= most * use
    return worth


@njit(nogil=True, cache=True)
def find_pattern(candidates, least, slack, max_nodes, found):  # type: ignore[no-untyped-def]
    """Find the most valuable pattern, in `found` [O], if its value exceeds `least`.

    Returns the value of the pattern (`least` if none was found), and whether it is proven that no
    pattern has more than `slack` times this value.
    """
    num_options, num_resources = candidates.use.shape
    counts = np.zeros(num_options)
    left, surrogate_left = np.ones((num_options + 1, num_resources)), np.ones(num_options + 1)
    worth, groups_left = np.zeros(num_options + 1), candidates.copies.copy()
    best, depth, down = least, 0, True
    for _ in range(max_nodes):
        if down:
            if worth[depth] > best:
                best = worth[depth]
                found[:depth] = counts[:depth]
                found[depth:] = 0.0
            if (
                depth == num_options
                or worth[depth] + _most_worth(depth, left, surrogate_left[depth], candidates) <= best * slack
            ):
                down, depth = False, depth - 1
                if depth < 0:
                    return best, True
                continue
            counts[depth] = _fitting(depth, depth, left, groups_left, candidates)
        else:
            if counts[depth] == 0.0:
                depth -= 1
                if depth < 0:
                    return best, True
                continue
            groups_left[candidates.group[depth]] += counts[depth] * candidates.part[depth]
            counts[depth] -= 1.0
        count = counts[depth]
        groups_left[candidates.group[depth]] -= count * candidates.part[depth]
        for resource in range(num_resources):
            left[depth + 1, resource] = left[depth, resource] - count * candidates.use[depth, resource]
        surrogate_left[depth + 1] = surrogate_left[depth] - count * candidates.surrogate[depth]
        worth[depth + 1] = worth[depth] + count * candidates.price[depth]
        down, depth = True, depth + 1
    return best, False
