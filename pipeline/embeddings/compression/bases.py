"""Choose how many classes each partition of a table's ids has (stdlib only; arXiv 1909.02107, section 3).

Bases b1 .. bk tell n ids apart where b1 * ... * bk >= n, and for remainders alone where they are also pairwise coprime.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from pipeline.runtime.errors import ConfigError


def check_bases(name: str, bases: Sequence[int], num_ids: int, coprime: bool) -> None:
    """Raises ConfigError where two ids would get the same code."""
    if (product := math.prod(bases)) < num_ids:
        raise ConfigError(
            f"tables.{name}.compression.bases={list(bases)} tell {product:,} ids apart, and the table has {num_ids:,}: "
            f"make their product at least that, e.g. {balanced_bases(num_ids, len(bases), coprime)}"
        )
    for left, right in combinations(bases, 2) if coprime else ():
        if (common := math.gcd(left, right)) > 1:
            raise ConfigError(
                f"tables.{name}.compression.bases={list(bases)}: {left} and {right} are not coprime (both are divisible by "
                f"{common}), so ids that differ by {math.lcm(left, right):,} would get one code; use e.g. "
                f"{balanced_bases(num_ids, len(bases), coprime)}, or scheme=generalised"
            )


def balanced_bases(num_ids: int, num_bases: int, coprime: bool = False) -> list[int]:
    """About num_ids ** (1 / num_bases) each: the fewest classes in all."""
    root = max(2, math.ceil(num_ids ** (1 / num_bases) - 1e-9))
    if not coprime:
        bases = [root] * (num_bases - 1)
        return [*bases, max(1, -(-num_ids // math.prod(bases)))]
    start = max(2, root - 2 * num_bases)
    while math.prod(found := coprime_from(start, num_bases)) < num_ids:
        start += 1
    return found


def bases_within(num_ids: int, num_bases: int, max_classes: int, coprime: bool = False) -> list[int] | None:
    """One large base and small others, together `max_classes` or little less; None where that is too few.

    The large one comes first. Small others mean that few ids share a class of it (the paper's enforced collisions).
    """
    least = sum(balanced_bases(num_ids, num_bases, coprime))
    if least > max_classes:
        return None
    small = 2
    while True:
        others = coprime_from(small, num_bases - 1) if coprime else [small] * (num_bases - 1)
        first = max_classes - sum(others)
        while coprime and first > 1 and any(math.gcd(first, other) > 1 for other in others):
            first -= 1
        if first > 1 and first * math.prod(others) >= num_ids:
            # The large base has taken what there was: the last small one may be smaller now.
            if not coprime:
                others[-1] = max(1, -(-num_ids // (first * math.prod(others[:-1]))))
            return [first, *others]
        if first <= small:  # rounding left no room for a large one
            return balanced_bases(num_ids, num_bases, coprime)
        small += 1


def coprime_from(start: int, count: int) -> list[int]:
    """`count` pairwise coprime numbers from `start` on, each the next that is coprime to those before."""
    found: list[int] = []
    candidate = start
    while len(found) < count:
        if all(math.gcd(candidate, other) == 1 for other in found):
            found.append(candidate)
        candidate += 1
    return found
