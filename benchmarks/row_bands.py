"""Estimate how many distinct rows a batch touches, and how many lookups miss a cache, from how lookups fall on rows.

A table's rows stand in bands: so many rows with so large a share of the lookups, evenly within a band.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.row_frequencies import RowFrequencies

Floats = NDArray[np.float64]
NUM_BANDS = 48
LINE_BYTES = 64


@dataclass(frozen=True)
class Bands:
    """rows [N]: in each band; shares [N]: of the table's lookups."""

    rows: Floats
    shares: Floats


@dataclass(frozen=True)
class Touched:
    """Expected numbers of one batch: distinct rows, ids that a cache does not hold, and distinct rows that it does not."""

    distinct: float
    missed_ids: float
    missed_rows: float


def even(num_rows: int) -> Bands:
    return Bands(np.array([float(num_rows)]), np.ones(1))


def power_law(num_rows: int, skew: float) -> Bands:
    """The first x of the rows have x^(1/skew) of the lookups; skew 1 is even."""
    edges = np.unique(np.concatenate([[0], np.geomspace(1, num_rows, NUM_BANDS)]).astype(np.int64))
    shares = (edges / num_rows) ** (1 / skew)
    return Bands(np.diff(edges).astype(float), np.diff(shares))


def bands_of(frequencies: RowFrequencies | None, num_rows: int) -> Bands:
    """Of a data set's curve; even where nothing is known. Rows beyond the curve's end have no lookups."""
    if frequencies is None or len(frequencies.rows) < 2:
        return even(num_rows)
    rows, shares = np.diff(np.array(frequencies.rows, float)), np.diff(np.array(frequencies.shares))
    kept = rows > 0
    return Bands(rows[kept], shares[kept] / max(float(shares[kept].sum()), 1e-12))


def touched(tables: Sequence[Bands], ids: Sequence[float], row_bytes: Sequence[float], cache: float) -> list[Touched]:
    """Of each table, where all of them share a cache of `cache` bytes that keeps the rows looked up most often."""
    rates = [band.shares * count / np.maximum(band.rows, 1e-9) for band, count in zip(tables, ids, strict=True)]
    lines = [-(-size // LINE_BYTES) * LINE_BYTES for size in row_bytes]
    sizes = [band.rows * size for band, size in zip(tables, lines, strict=True)]
    order = np.argsort(-np.concatenate(rates), kind="stable") if tables else np.empty(0, np.int64)
    ends = np.cumsum(np.concatenate(sizes)[order]) if tables else np.empty(0)
    flat = np.concatenate(sizes)[order] if tables else np.empty(0)
    kept = np.empty(len(order))
    kept[order] = np.clip((cache - (ends - flat)) / np.maximum(flat, 1e-9), 0.0, 1.0)
    found, begin = [], 0
    for band, count, rate in zip(tables, ids, rates, strict=True):
        missed = 1 - kept[begin : begin + len(band.rows)]
        distinct = -np.expm1(-rate) * band.rows
        found.append(
            Touched(
                float(distinct.sum()), float((missed * band.shares * count).sum()), float((missed * distinct).sum())
            )
        )
        begin += len(band.rows)
    return found
