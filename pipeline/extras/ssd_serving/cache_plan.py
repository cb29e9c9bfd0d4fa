"""Plan how many rows of each table to keep in memory, by frequency curves and a bound on a
request's latency.

Ids are sorted by descending frequency, so a table's hot rows are its first rows. The curve tells
how often a lookup misses the first n rows (software-defined memory, arXiv 2110.11489). Rows that
save the most reads per byte come first, over all tables. This is optimal, because the curves are
concave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.data.dataset import FrequencyCurve

QUANTILE, QUANTILE_DEVIATIONS = 0.99, 2.326
EXACT_BELOW = 50.0  # for a larger mean, a normal distribution is as good as Poisson


@dataclass(frozen=True)
class TableHeat:
    """How a table is looked up. lookups_per_row: lookups per scored row, distributed over ids as
    `curve` says.
    """

    num_rows: int
    row_bytes: int
    lookups_per_row: float
    curve: FrequencyCurve


@dataclass(frozen=True)
class CachePlan:
    """The plan. heads[t]: how many first rows of table t are in memory; their bytes, and the misses
    per scored row.
    """

    heads: list[int]
    cache_bytes: int
    misses_per_row: float


@dataclass(frozen=True)
class _Segment:
    """`num_rows` rows of a table that together get `lookups` per scored row, evenly distributed."""

    table: int
    num_rows: int
    lookups: float
    row_bytes: int

    @property
    def lookups_per_byte(self) -> float:
        return self.lookups / (self.num_rows * self.row_bytes)


def plan_for_bytes(tables: Sequence[TableHeat], cache_bytes: int) -> CachePlan:
    """Return the plan with the fewest misses for `cache_bytes`."""
    return _plan(tables, cache_bytes, 0.0)


def plan_for_misses(tables: Sequence[TableHeat], misses_per_row: float) -> CachePlan:
    """Return the smallest plan whose mean number of misses per scored row is at most
    `misses_per_row`.
    """
    return _plan(tables, sum(table.num_rows * table.row_bytes for table in tables), misses_per_row)


def _plan(tables: Sequence[TableHeat], cache_bytes: int, misses_per_row: float) -> CachePlan:
    # row 0, the unknown id, is not part of a curve
    heads = [1 if table.num_rows else 0 for table in tables]
    left_bytes = cache_bytes - sum(table.row_bytes for table in tables)
    misses = sum(table.lookups_per_row for table in tables)
    segments = [segment for number, table in enumerate(tables) for segment in _segments(number, table)]
    for segment in sorted(segments, key=lambda part: part.lookups_per_byte, reverse=True):
        if left_bytes <= 0 or misses <= misses_per_row or not segment.lookups:
            break
        wanted = math.ceil(segment.num_rows * min(1.0, (misses - misses_per_row) / segment.lookups))
        taken = min(wanted, left_bytes // segment.row_bytes)
        heads[segment.table] += taken
        left_bytes -= taken * segment.row_bytes
        misses -= segment.lookups * taken / segment.num_rows
    used = sum(head * table.row_bytes for head, table in zip(heads, tables, strict=True))
    return CachePlan(heads, used, max(0.0, misses))


def _segments(number: int, table: TableHeat) -> list[_Segment]:
    """Split the curve at its points. Rows without a lookup in training are in no segment."""
    segments: list[_Segment] = []
    rank, share = 0, 0.0
    for next_rank, next_share in zip(table.curve.ranks, table.curve.shares, strict=True):
        next_rank = min(next_rank, table.num_rows - 1)
        if next_rank > rank:
            lookups = max(0.0, next_share - share) * table.lookups_per_row
            segments.append(_Segment(number, next_rank - rank, lookups, table.row_bytes))
            rank, share = next_rank, next_share
    return segments


def misses_allowed(p99_target_ms: float, request_rows: int, io_threads: int, read_us: float) -> float:
    """Return the mean number of misses per scored row with which 99 % of requests read their rows
    in time.

    A request's misses are Poisson. `io_threads` reads of `read_us` run at the same time.
    """
    waves = int(p99_target_ms * 1000 / max(read_us, 1e-9))
    most = waves * io_threads
    low, high = 0.0, float(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if quantile(middle) <= most else (low, middle)
    return low / request_rows


def quantile(mean: float) -> float:
    """Return the smallest count that a Poisson variable of this mean exceeds in at most 1 % of
    cases.
    """
    if mean >= EXACT_BELOW:
        return mean + QUANTILE_DEVIATIONS * math.sqrt(mean)
    probability = total = math.exp(-mean)
    count = 0
    while total < QUANTILE:
        count += 1
        probability *= mean / count
        total += probability
    return float(count)


def joined(curves: Sequence[tuple[float, FrequencyCurve]]) -> FrequencyCurve:
    """Join the curves of features that share a table, given as (lookups per scored row, curve)."""
    ranks = sorted({rank for _, curve in curves for rank in curve.ranks})
    total = sum(lookups for lookups, _ in curves) or 1.0
    shares = np.zeros(len(ranks))
    for lookups, curve in curves:
        shares += lookups / total * np.interp(ranks, [0, *curve.ranks], [0.0, *curve.shares])
    return FrequencyCurve(ranks, shares.tolist())
