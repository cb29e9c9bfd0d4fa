"""Say which rows of a trained table an artifact keeps: those that were trained, or those that are looked up often."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from pipeline.checkpoint.reshard import read_row_state
from pipeline.checkpoint.tables import StoredTable
from pipeline.checkpoint.tensors import StepTensors
from pipeline.embeddings.config import Table
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.serving.config import PruningConfig
from pipeline.serving.kept_rows import KeptRows, RowMask
from pipeline.serving.table_files import block_rows

# What grows with each time that a row is trained, in the order in which it is looked for: (row-wise) Adagrad of FBGEMM,
# Adagrad and Adam of torch, Adam of FBGEMM.
STATES = ("sum", "exp_avg_sq", "momentum2", "momentum1")
BUCKETS = 1 << 16


def rows_to_keep(tensors: StepTensors, stored: StoredTable, table: Table, config: PruningConfig) -> KeptRows | None:
    """None: all of them, as of every part of a compressed table, whose rows stand for many ids each.

    Raises:
        ValueError: the optimizer keeps no state that says which rows were trained.
    """
    if table.part_of is not None:
        return None
    if config.kind == "untrained":
        kept = _trained(tensors, stored, config)
    elif config.kind == "frequency" and table.frequencies is not None and table.frequencies.by_row:
        kept = _first_rows(stored.rows, _num_frequent(stored.rows, table.frequencies, config))
    else:
        return None
    return None if kept.num_kept == stored.rows else kept


def _trained(tensors: StepTensors, stored: StoredTable, config: PruningConfig) -> KeptRows:
    state = next((name for name in STATES if name in stored.states), None)
    if state is None:
        raise ValueError(
            f"pruning.kind=untrained wants optimizer state that says which rows of {stored.name!r} were trained, and this "
            "run's optimizer keeps none (it has it with adagrad, rowwise_adagrad and adam); use pruning.kind=frequency"
        )
    limit = config.state_at_most
    if config.fraction is not None:
        limit = max(limit, _limit_of(tensors, stored, state, config.fraction))
    mask, first = RowMask(stored.rows), 0
    for values in _state_blocks(tensors, stored, state):
        mask.set_block(first, (values > limit).numpy())
        first += len(values)
    return mask.finish()


def _limit_of(tensors: StepTensors, stored: StoredTable, state: str, fraction: float) -> float:
    """The largest state that at most `fraction` of the rows do not pass, by a histogram of 65,536 buckets.

    The upper 16 bits of a float32 that is not negative ascend with it.
    """
    counts = np.zeros(BUCKETS, np.int64)
    for values in _state_blocks(tensors, stored, state):
        counts += np.bincount(values.numpy().view(np.uint32) >> 16, minlength=BUCKETS)
    upto = int(np.searchsorted(np.cumsum(counts), fraction * stored.rows, side="right"))
    edge = np.array([max(upto << 16, 1) - 1], np.uint32).view(np.float32)[0]
    return float(edge) if upto else -1.0


def _state_blocks(tensors: StepTensors, stored: StoredTable, state: str) -> Iterator[torch.Tensor]:
    """[n] float32, not negative: the state of successive rows, the largest of a row where it has one an element."""
    rows_at_once = block_rows(4 if stored.is_row_wise(state) else 4 * stored.dim)
    for first in range(0, stored.rows, rows_at_once):
        count = min(rows_at_once, stored.rows - first)
        if stored.is_row_wise(state):
            values = read_row_state(tensors, stored, state, first, count, (0, stored.dim))
        else:
            values = tensors.read(stored.states[state].key, [first, 0], [count, stored.dim]).amax(dim=1)
        yield values.float().clamp_min(0.0) + 0.0  # + 0.0: no -0.0, whose bits are those of a large number


def _num_frequent(num_rows: int, frequencies: RowFrequencies, config: PruningConfig) -> int:
    """How many of the first rows stay."""
    if config.fraction is not None:
        return num_rows - int(config.fraction * num_rows)
    wanted = config.keep_lookups or 0.0
    after = next((i for i, share in enumerate(frequencies.shares) if share >= wanted), len(frequencies.shares) - 1)
    if after == 0:
        return frequencies.rows[0]
    (left, low), (right, high) = ((frequencies.rows[i], frequencies.shares[i]) for i in (after - 1, after))
    return left + int(np.ceil((right - left) * (wanted - low) / max(high - low, 1e-12)))


def _first_rows(num_rows: int, num_kept: int) -> KeptRows:
    mask = RowMask(num_rows)
    mask.set_block(0, np.arange(num_rows) < num_kept)
    return mask.finish()
