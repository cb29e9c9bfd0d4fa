"""Find the smallest mix of table precisions within a budget of NE:  export with precision=auto

The search measures how much NE each table costs at each precision, with all other tables as they were trained. It goes
down in the order of bytes saved for NE lost. By bisection it takes the smallest mix on that way whose NE, measured as a
whole, is within the budget, because losses of single tables need not add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from pipeline.config.serving import PRECISIONS, ParityConfig
from pipeline.runtime.logs import progress
from pipeline.serving.artifact.certificate import excesses
from pipeline.serving.artifact.quantize import fits, row_bytes
from pipeline.serving.artifact.reference import BATCH_ROWS, SPLIT, Reference

ROWS = 16_384  # on which single tables are measured; whole mixes are measured on the whole sample
NEAR = 0.75  # of the limits of parity on AUC and single scores
MIN_LOSS = 1e-9  # a smaller loss, or a gain, is noise


def find_mix(reference: Reference, fixed: dict[str, str], budget: float, limits: ParityConfig) -> list[str]:
    """Return the smallest precisions, one a table; tables in `fixed` keep theirs. budget: of NE, on validation.

    A mix near one of `limits` on validation is left out, because other splits, pruning and layers add to its
    difference, and the artifact would be refused.
    """
    sizes = [
        {name: stored.rows * row_bytes(stored.dim, name) for name in _choices(stored.dim, fixed.get(table.name))}
        for table, stored in zip(reference.trained.tables, reference.trained.stored, strict=True)
    ]
    losses = table_losses(reference, sizes)
    near = replace(
        limits,
        max_auc_decrease=NEAR * limits.max_auc_decrease,
        max_score_difference=NEAR * limits.max_score_difference,
    )
    with progress("finding the smallest mix") as bar:

        def measure(precisions: list[str]) -> float:
            bar.advance(1)
            parity = reference.parity_of(SPLIT, precisions)
            return math.inf if excesses({SPLIT: parity}, near) else parity.ne_delta

        return smallest_mix(sizes, losses, measure, budget)


def _choices(dim: int, fixed: str | None) -> list[str]:
    return [fixed] if fixed else [name for name in PRECISIONS if fits(dim, name)]


def table_losses(reference: Reference, sizes: list[dict[str, int]]) -> list[dict[str, float]]:
    """Return for each table: precision -> NE that it alone costs, on the first ROWS rows of the sample."""
    few = reference.first_batches(SPLIT, ROWS // BATCH_ROWS)
    losses: list[dict[str, float]] = []
    with progress("measuring tables", sum(len(one) for one in sizes)) as bar:
        for number, one in enumerate(sizes):
            losses.append({})
            for name in one:
                alone = ["fp32"] * len(sizes)
                alone[number] = name
                losses[-1][name] = few.parity_of(SPLIT, alone).ne_delta
                bar.advance(1)
    return losses


class Step(NamedTuple):
    """Table `table` goes down to `precision`."""

    table: int
    precision: str
    bytes_saved: int
    loss: float

    @property
    def order(self) -> tuple[float, int, int]:
        return self.loss / self.bytes_saved, self.table, -self.bytes_saved


def steps_down(sizes: list[dict[str, int]], losses: list[dict[str, float]]) -> list[Step]:
    """Return all worthwhile steps, best first. sizes[t] and losses[t]: precision -> bytes and NE of table t.

    Of one table only the steps on its convex hull count: a precision that loses more for each byte than a smaller
    precision is left out. So each table's steps come in order.
    """
    steps: list[Step] = []
    for table, (own, lost) in enumerate(zip(sizes, losses, strict=True)):
        names = [name for name in PRECISIONS if name in own]
        at = names[0]
        while below := [name for name in names[names.index(at) + 1 :] if own[name] < own[at]]:
            base = max(lost.get(at, 0.0), 0.0)
            candidates = [
                Step(table, name, own[at] - own[name], max(lost.get(name, 0.0) - base, 0.0) + MIN_LOSS)
                for name in below
            ]
            steps.append(min(candidates, key=lambda step: step.order))
            at = steps[-1].precision
    return sorted(steps, key=lambda step: step.order)


def smallest_mix(
    sizes: list[dict[str, int]],
    losses: list[dict[str, float]],
    measure: Callable[[list[str]], float],
    budget: float,
) -> list[str]:
    """Return a precision for each table. `measure` gives the NE of a whole mix; the largest precisions cost none."""
    start = [next(name for name in PRECISIONS if name in of_table) for of_table in sizes]
    steps = steps_down(sizes, losses)

    def mix(count: int) -> list[str]:
        precisions = list(start)
        for taken in steps[:count]:
            precisions[taken.table] = taken.precision
        return precisions

    low, high = 0, len(steps)  # `low` steps are within the budget, more than `high` are not
    while low < high:
        middle = (low + high + 1) // 2
        if measure(mix(middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return mix(low)
