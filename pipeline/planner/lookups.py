"""Count the lookups of each of a table's shards, and the share that a cache serves, from its frequency curve."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.planner.search.problem import Floats

Rows = NDArray[np.int64]


def shard_shares(frequencies: RowFrequencies | None, first_rows: Rows, num_rows: Rows, table_rows: int) -> Floats:
    """[S] of a table's lookups, those of rows first_rows .. first_rows + num_rows.

    Even over rows where nothing is known, and where ids are hashed and so scattered.
    """
    if frequencies is None or not frequencies.by_row:
        return num_rows / table_rows
    return _upto(frequencies, first_rows + num_rows) - _upto(frequencies, first_rows)


def hit_rates(frequencies: RowFrequencies | None, first_rows: Rows, num_rows: Rows, load_factor: float) -> Floats:
    """[S]: of each shard's lookups, those of the load_factor x num_rows hottest rows of the shard.

    A cache that keeps what is used most often comes close to it (FBGEMM's LFU, and LRU where the hot rows
    come in every batch). Where nothing is known, lookups are even and the rate is the load factor.
    """
    cached = np.minimum(num_rows, load_factor * num_rows)
    if frequencies is None:
        return np.full(len(num_rows), min(1.0, load_factor))
    if not frequencies.by_row:  # each shard has its part of the hot rows
        whole = frequencies.rows[-1]
        return np.full(len(num_rows), float(_upto(frequencies, np.array([load_factor * whole]))[0]))
    before = _upto(frequencies, first_rows)
    lookups = _upto(frequencies, first_rows + num_rows) - before
    hits = _upto(frequencies, first_rows + cached) - before
    return np.divide(hits, lookups, out=np.ones_like(hits), where=lookups > 0)


def _upto(frequencies: RowFrequencies, rows: Rows | Floats) -> Floats:
    """Lookups of the first `rows` rows; rows beyond the curve have none."""
    return np.interp(rows, frequencies.rows, frequencies.shares)
