"""Choose the rows of a trained table that an artifact keeps: rows that were trained, or rows that are looked up often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from pipeline.checkpoint.reshard import read_row_state
from pipeline.checkpoint.tables import StoredTable
from pipeline.checkpoint.tensors import StepTensors
from pipeline.config.serving import PruningConfig
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.quantize import KeptRows, RowMask
from pipeline.serving.artifact.trained_step import TrainedStep, block_rows

# State that grows each time a row is trained, in the order of search: (row-wise) Adagrad of FBGEMM, Adagrad and Adam of
# torch, Adam of FBGEMM.
STATES = ("sum", "exp_avg_sq", "momentum2", "momentum1")
BUCKETS = 1 << 16
logger = get_logger("pipeline.export")


def prune_tables(step: TrainedStep, config: PruningConfig) -> list[KeptRows | None]:
    """Return for each table the rows to keep. None means all rows.

    A part of a compressed table keeps all its rows, because each of them stands for many ids.
    `config.fraction` counts rows of all tables that may be pruned. Raises ServingError if the optimizer
    keeps no state that says which rows were trained.
    """
    if config.kind == "none":
        return [None] * len(step.tables)
    whole = [stored for stored, table in zip(step.stored, step.tables, strict=True) if table.part_of is None]
    if config.kind == "untrained":
        limit = config.state_at_most
        if config.fraction is not None:
            limit = max(limit, _limit_of(step.tensors, whole, config.fraction))
        chosen = {stored.name: _trained(step.tensors, stored, limit) for stored in whole}
    else:
        chosen = {name: _first_rows(rows, kept) for name, (rows, kept) in _num_frequent(step.tables, config).items()}
    kept = [chosen.get(stored.name) for stored in step.stored]
    kept = [None if rows is None or rows.num_kept == rows.num_rows else rows for rows in kept]
    after = sum(stored.rows if rows is None else rows.num_kept for stored, rows in zip(step.stored, kept, strict=True))
    before = step.num_rows
    logger.info(
        "pruning    %s: %s of %s rows stay (%.1f %%)", config.kind, f"{after:,}", f"{before:,}", 100 * after / before
    )
    return kept


def _trained(tensors: StepTensors, stored: StoredTable, limit: float) -> KeptRows:
    """Return the rows whose optimizer state is above `limit`."""
    mask, first = RowMask(stored.rows), 0
    for values in _state_blocks(tensors, stored):
        mask.set_block(first, (values > limit).numpy())
        first += len(values)
    return mask.finish()


def _limit_of(tensors: StepTensors, stored: Sequence[StoredTable], fraction: float) -> float:
    """Return the largest limit such that at most `fraction` of all rows have a state up to it. The
    function makes a histogram of the upper 16 bits of float32, which increase with the value if
    it is not negative.
    """
    counts = np.zeros(BUCKETS, np.int64)
    for stored_table in stored:
        for values in _state_blocks(tensors, stored_table):
            counts += np.bincount(values.numpy().view(np.uint32) >> 16, minlength=BUCKETS)
    upto = int(np.searchsorted(np.cumsum(counts), fraction * counts.sum(), side="right"))
    edge = np.array([max(upto << 16, 1) - 1], np.uint32).view(np.float32)[0]
    return float(edge) if upto else -1.0


def _state_blocks(tensors: StepTensors, stored: StoredTable) -> Iterator[torch.Tensor]:
    """Yield the states of successive rows, [n] float32, not negative. A row's state is its largest number."""
    state = next((name for name in STATES if name in stored.states), None)
    if state is None:
        raise ServingError(
            f"pruning.kind=untrained needs optimizer state that says which rows of {stored.name!r} were trained, and this "
            "run's optimizer keeps none (adagrad, rowwise_adagrad and adam keep it); use pruning.kind=frequency"
        )
    rows_at_once = block_rows(4 if stored.is_row_wise(state) else 4 * stored.dim)
    for first in range(0, stored.rows, rows_at_once):
        count = min(rows_at_once, stored.rows - first)
        if stored.is_row_wise(state):
            values = read_row_state(tensors, stored, state, first, count, (0, stored.dim))
        else:
            values = tensors.read(stored.states[state].key, [first, 0], [count, stored.dim]).amax(dim=1)
        yield values.float().clamp_min(0.0) + 0.0  # + 0.0: no -0.0, whose bits are those of a large number


def _num_frequent(tables: Sequence[Table], config: PruningConfig) -> dict[str, tuple[int, int]]:
    """Return table -> (rows, number of first rows to keep), for tables whose rows are ordered by frequency."""
    ordered = [
        (table, table.frequencies)
        for table in tables
        if table.part_of is None and table.frequencies is not None and table.frequencies.by_row
    ]
    if config.keep_lookups is not None:
        wanted = config.keep_lookups
        return {table.name: (table.num_embeddings, _rows_of_share(curve, wanted)) for table, curve in ordered}
    # Stretches of the curves, each with its lookups a row. The coldest stretches are left out first.
    stretches = [stretch for table, curve in ordered for stretch in _stretches(table, curve)]
    kept = {table.name: table.num_embeddings for table, _ in ordered}
    left_over = int((config.fraction or 0.0) * sum(kept.values()))
    for _, rows, name in sorted(stretches):
        gone = min(rows, left_over)
        kept[name] -= gone
        left_over -= gone
    return {table.name: (table.num_embeddings, kept[table.name]) for table, _ in ordered}


def _stretches(table: Table, curve: RowFrequencies) -> Iterator[tuple[float, int, str]]:
    """Yield (lookups per row, number of rows, table) for ranges of successive rows. The last range
    has one row less, because row 0 (unknown ids) is always kept, and without unknown ids the
    curve counts it there.
    """
    factor = sum(table.pooling_factors)
    for (left, right), (low, high) in zip(pairwise(curve.rows), pairwise(curve.shares), strict=True):
        yield factor * (high - low) / (right - left), right - left - (right == curve.rows[-1]), table.name
    if (beyond := table.num_embeddings - curve.rows[-1]) > 0:
        yield 0.0, beyond, table.name


def _rows_of_share(curve: RowFrequencies, share: float) -> int:
    """Return the smallest number of first rows that have this share of the lookups."""
    for (left, right), (low, high) in zip(pairwise(curve.rows), pairwise(curve.shares), strict=True):
        if high >= share:
            return left + int(np.ceil((right - left) * max(0.0, share - low) / max(high - low, 1e-12)))
    return curve.rows[-1]


def _first_rows(num_rows: int, num_kept: int) -> KeptRows:
    mask = RowMask(num_rows)
    mask.set_block(0, np.arange(num_rows) < num_kept)
    return mask.finish()
