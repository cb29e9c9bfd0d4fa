"""Estimate from frequency curves how lookups are distributed over rows (stdlib only).

Vocabulary ids are sorted by descending frequency, so a table's first rows are its hottest. Hashed
ids are in no order: for them the curve states the shares of the hottest rows, but not which rows
these are.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pipeline.data.dataset import FrequencyCurve, SparseFeature

POINTS = 64  # maximum number of points of a part's curve


@dataclass(frozen=True)
class RowFrequencies:
    """The share `shares[i]` of a table's lookups is for its `rows[i]` hottest rows. `rows` ascends
    from 0.

    `by_row`: the hottest rows are the first rows.
    """

    rows: list[int]
    shares: list[float]
    by_row: bool = True


def merge_frequencies(
    features: list[SparseFeature], pooling_factors: list[float], multi_hot: dict[str, int]
) -> RowFrequencies | None:
    """Merge the curves of a table's features. Return None if no curve has more than its end point.

    `multi_hot`: features with one id from the data and additional uniform ids
    (data/read/multi_hot.py).
    """
    curves = [feature.frequency_curve for feature in features]
    if all(len(curve.ranks) < 2 for curve in curves) or not sum(pooling_factors):
        return None
    rows = sorted({0, *(rank for curve in curves for rank in curve.ranks)})
    shares = [0.0] * len(rows)
    for feature, factor in zip(features, pooling_factors, strict=True):
        sampled_evenly = 1 - 1 / max(1, multi_hot.get(feature.name, 1))
        for index, row in enumerate(rows):
            even = min(1.0, row / feature.cardinality)
            share = (1 - sampled_evenly) * share_of(feature.frequency_curve, row) + sampled_evenly * even
            shares[index] += factor / sum(pooling_factors) * share
    return RowFrequencies(rows, shares, all(feature.hash_size is None for feature in features))


def share_of(curve: FrequencyCurve, rank: int) -> float:
    """Return the share of lookups that are for the `rank` most frequent ids. It is linear between points."""
    after = bisect_right(curve.ranks, rank)
    if after == len(curve.ranks):
        return 1.0
    left, share = (curve.ranks[after - 1], curve.shares[after - 1]) if after else (0, 0.0)
    return share + (curve.shares[after] - share) * (rank - left) / (curve.ranks[after] - left)


def share_of_first(frequencies: RowFrequencies, num_ids: float) -> float:
    """Return the share of a table's lookups that are for its `num_ids` most frequent ids."""
    rows, shares = frequencies.rows, frequencies.shares
    after = bisect_right(rows, num_ids)
    if after == 0:
        return 0.0
    if after == len(rows):
        return shares[-1]
    left, right = rows[after - 1], rows[after]
    return shares[after - 1] + (shares[after] - shares[after - 1]) * (num_ids - left) / (right - left)


def hashed_frequencies(frequencies: RowFrequencies | None, num_rows: int) -> RowFrequencies | None:
    """Estimate the frequencies of the rows of a part with hashed ids. Return None if they are unknown."""
    if frequencies is None:
        return None
    points = points_of(num_rows)
    # Most of the hottest ids have different rows; the other ids are even over all rows.
    shares = [first + (1 - first) * row / num_rows for row in points for first in [share_of_first(frequencies, row)]]
    return RowFrequencies(points, shares, by_row=False)


def frequencies_of_block(frequencies: RowFrequencies | None, first: int, end: int) -> RowFrequencies | None:
    """Return the frequencies of ids first .. end - 1, if they are the rows of a separate table."""
    if frequencies is None or not frequencies.by_row:
        return None
    before, all_ = share_of_first(frequencies, first), share_of_first(frequencies, end)
    if all_ <= before:
        return None
    points = points_of(end - first)
    return RowFrequencies(
        points, [(share_of_first(frequencies, first + row) - before) / (all_ - before) for row in points]
    )


def share_of_block(frequencies: RowFrequencies | None, first: int, end: int, num_ids: int) -> float:
    """Return the share of lookups that are for ids first .. end - 1; uniform if frequencies are unknown or hashed."""
    if frequencies is None or not frequencies.by_row:
        return (end - first) / num_ids
    return share_of_first(frequencies, end) - share_of_first(frequencies, first)


def points_of(num_rows: int) -> list[int]:
    """Return 0, 1, 2, 4, ... and num_rows, and more points between them if possible."""
    points, row = {0, num_rows}, 1.0
    factor = max(1.2, num_rows ** (1 / (POINTS - 2))) if num_rows > 1 else 2.0
    while row < num_rows:
        points.add(int(row))
        row = max(row + 1, row * factor)
    return sorted(points)
