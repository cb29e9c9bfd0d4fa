"""Find the smallest precisions of tables whose NE stays within a budget.

How much NE each table costs at each precision is measured, all others left as they are; steps down are taken in the
order of bytes saved per NE lost. Of the mixes on that way the smallest is taken whose NE, measured as a whole, is within
the budget, by bisection: single losses need not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.config.serving import PRECISIONS

LEAST_LOSS = 1e-9  # a gain is noise, not a reason to prefer a table


@dataclass(frozen=True)
class Step:
    """Table `table` goes down to `precision`."""

    table: int
    precision: str
    bytes_saved: int
    loss: float


def steps_down(sizes: list[dict[str, int]], losses: list[dict[str, float]]) -> list[Step]:
    """All worthwhile steps, best first. sizes[t] and losses[t]: precision -> bytes of table t, and NE that it costs.

    Of one table only the steps on its convex hull count: a precision that loses more per byte than a smaller one is
    passed over. So each table's steps come in order.
    """
    steps = [step for table in range(len(sizes)) for step in _hull(table, sizes[table], losses[table])]
    return sorted(steps, key=lambda step: (step.loss / step.bytes_saved, step.table, -step.bytes_saved))


def _hull(table: int, sizes: dict[str, int], losses: dict[str, float]) -> list[Step]:
    names = [name for name in PRECISIONS if name in sizes]
    lost = {name: max(losses.get(name, 0.0), 0.0) for name in names}
    steps, at = [], names[0]
    while below := [name for name in names[names.index(at) + 1 :] if sizes[name] < sizes[at]]:

        def step(name: str, at: str = at) -> Step:
            return Step(table, name, sizes[at] - sizes[name], max(lost[name] - lost[at], 0.0) + LEAST_LOSS)

        best = min(
            (step(name) for name in below),
            key=lambda candidate: (candidate.loss / candidate.bytes_saved, -candidate.bytes_saved),
        )
        steps.append(best)
        at = best.precision
    return steps


def smallest_mix(
    sizes: list[dict[str, int]],
    losses: list[dict[str, float]],
    measure: Callable[[list[str]], float],
    budget: float,
) -> list[str]:
    """A precision a table. `measure` gives the NE that a whole mix costs; a table's largest precision costs none."""
    start = [next(name for name in PRECISIONS if name in of_table) for of_table in sizes]
    steps = steps_down(sizes, losses)

    def mix(count: int) -> list[str]:
        precisions = list(start)
        for taken in steps[:count]:
            precisions[taken.table] = taken.precision
        return precisions

    low, high = 0, len(steps)  # `low` steps are known to be within the budget, more than `high` are not
    while low < high:
        middle = (low + high + 1) // 2
        if measure(mix(middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return mix(low)
