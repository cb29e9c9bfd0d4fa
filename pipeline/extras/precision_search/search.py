"""Find the smallest mix of table precisions within a budget of NE:  export with precision=auto

The search measures how much NE each table costs at each precision, with all other tables as they
were trained, on one half of the validation rows. It then orders the steps to a lower
precision: first those that save the most bytes for the NE that they cost. Bisection finds how many
of these steps the budget allows. The NE that a mix costs plus one standard error must be within the
budget. It is measured for the whole mix, because the costs of single tables need not add up. It is
measured on the other half of the rows, because on the first half a table may look cheap by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeline.config.serving import PRECISIONS, ParityConfig
from pipeline.runtime.logs import progress
from pipeline.serving.artifact.certificate import excesses
from pipeline.serving.artifact.quantize import fits, row_bytes
from pipeline.serving.artifact.reference import BATCH_ROWS, SPLIT, Reference, Scores
from pipeline.serving.artifact.task_quality import compare, qualities

ROWS = 16_384  # at most, on which single tables are measured
PARTS = 8  # of the rows that decide, for the standard error of the NE that a mix costs
NEAR = 0.75  # of the limits of parity on AUC and single scores
MIN_LOSS = 1e-9  # a smaller loss, or a gain, is noise


def find_mix(reference: Reference, fixed: dict[str, str], budget: float, limits: ParityConfig) -> list[str]:
    """Return the smallest precisions, one a table; tables in `fixed` keep theirs. budget: of NE, on
    every second batch of the validation rows; the other batches say what single tables cost.

    A mix near one of `limits` on validation is left out, because other splits, pruning and layers add to its
    difference, and the artifact would be refused.
    """
    sizes = [
        {name: stored.rows * row_bytes(stored.dim, name) for name in _choices(stored.dim, fixed.get(table.name))}
        for table, stored in zip(reference.trained.tables, reference.trained.stored, strict=True)
    ]
    choosing = deciding = reference
    if len(reference.samples[SPLIT].batches) > 1:
        choosing, deciding = (reference.of_batches(SPLIT, slice(first, None, 2)) for first in (0, 1))
    losses = table_losses(choosing, sizes)
    near = replace(
        limits,
        max_auc_decrease=NEAR * limits.max_auc_decrease,
        max_score_difference=NEAR * limits.max_score_difference,
    )
    with progress("finding the smallest mix") as bar:

        def measure(precisions: list[str]) -> float:
            bar.advance(1)
            scores = deciding.scores_of(SPLIT, precisions)
            if excesses({SPLIT: deciding.compare(SPLIT, scores)}, near):
                return math.inf
            return highest_cost(deciding, scores)

        return smallest_mix(sizes, losses, measure, budget)


def highest_cost(reference: Reference, scores: Scores) -> float:
    """Return the NE that `scores` cost on validation rows plus one standard error, by PARTS of the rows."""
    trained, rows = reference.scores[SPLIT], reference.samples[SPLIT].labels
    costs = []
    for part in range(PARTS):
        mine = slice(part, None, PARTS)
        labels = rows._replace(labels=rows.labels[mine], weights=rows.weights[mine])
        costs.append(compare(trained[mine], scores[mine], labels, qualities(labels, trained[mine])).ne_delta)
    return float(np.mean(costs) + np.std(costs, ddof=1) / math.sqrt(PARTS))


def _choices(dim: int, fixed: str | None) -> list[str]:
    return [fixed] if fixed else [name for name in PRECISIONS if fits(dim, name)]


def table_losses(reference: Reference, sizes: list[dict[str, int]]) -> list[dict[str, float]]:
    """Return for each table: precision -> NE that it alone costs, on the first ROWS rows of the sample."""
    few = reference.of_batches(SPLIT, slice(0, ROWS // BATCH_ROWS))
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
