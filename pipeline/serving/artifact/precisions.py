"""Choose the precision of each table of an artifact: the one that was asked for, or the smallest mix within a budget.

The search measures how much NE each table costs at each precision, with all other tables as they were trained. It goes
down in the order of bytes saved for NE lost, and takes the smallest mix on that way whose NE, measured as a whole, is
within the budget, by bisection: losses of single tables need not add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.serving import AUTO, PRECISIONS, ParityConfig
from pipeline.runtime.logs import get_logger, progress
from pipeline.serving.artifact.certificate import excesses
from pipeline.serving.artifact.quantize import fits, nearest, row_bytes
from pipeline.serving.artifact.reference import BATCH_ROWS, SPLIT, Reference
from pipeline.serving.artifact.trained_step import TrainedStep

logger = get_logger(__name__)
MAX_NAMED = 8
ROWS = 16_384  # on which single tables are measured; whole mixes are measured on the whole sample
NEAR = 0.75  # of the limits of parity on AUC and single scores
MIN_LOSS = 1e-9  # a smaller loss, or a gain, is noise


def choose_precisions(job: ExportJob, reference: Reference) -> list[str]:
    """Return one precision for each table: job.precision, or the one that job.tables gives its name.

    Raises:
        ServingError: a table cannot have rows of its precision.
    """
    if job.precision != AUTO:
        return given_precisions(job, reference.trained)
    return _logged(find_mix(reference, _fixed(reference.trained, job.tables), job.ne_budget, job.parity))


def given_precisions(job: ExportJob, trained: TrainedStep) -> list[str]:
    """As choose_precisions, for a precision other than auto."""
    precision, fixed = job.precision, _fixed(trained, job.tables)
    found = [fixed.get(table.name) or nearest(table.embedding_dim, precision) for table in trained.tables]
    names = [table.name for table in trained.tables]
    missed = [name for name, has in zip(names, found, strict=True) if has != precision and name not in fixed]
    if missed:
        named = ", ".join(missed[:MAX_NAMED]) + (", ..." if len(missed) > MAX_NAMED else "")
        logger.info(
            "%d table(s) have no %s rows of their width and get the next larger: %s", len(missed), precision, named
        )
    return _logged(found)


def _fixed(trained: TrainedStep, tables: dict[str, str]) -> dict[str, str]:
    """Table -> the precision that its name asks for. Raises ServingError if a table cannot have it."""
    fixed = {}
    for table in trained.tables:
        asked = tables.get(table.name) or tables.get(table.config_name)
        if asked is not None:
            row_bytes(table.embedding_dim, asked)
            fixed[table.name] = asked
    return fixed


def _logged(found: list[str]) -> list[str]:
    counts = {name: found.count(name) for name in PRECISIONS if name in found}
    logger.info("precision  %s", ", ".join(f"{count} table(s) {name}" for name, count in counts.items()))
    return found


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
