"""Estimate how a table's lookups fall on its rows, and on the rows of its parts, by features' frequency curves (stdlib only).

Vocabulary ids come by descending frequency, so a table's first rows are its hottest. Hashed ids are scattered: then the
curve says how hot the hottest rows are, not where they lie.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pipeline.data.dataset import FrequencyCurve, SparseFeature

POINTS = 64  # of a part's curve, at most
TERMS = 4096  # of the ids that share a row, at most so many are added up one by one


@dataclass(frozen=True)
class RowFrequencies:
    """`shares[i]` of a table's lookups fall on its `rows[i]` hottest rows (both ascending, from 0 to 1).

    `by_row`: the hottest rows are the first ones.
    """

    rows: list[int]
    shares: list[float]
    by_row: bool = True


def merge_frequencies(
    features: list[SparseFeature], pooling_factors: list[float], multi_hot: dict[str, int]
) -> RowFrequencies | None:
    """Merge the curves of the features that a table embeds; None where no curve has more than its end.

    `multi_hot`: features whose bags are one id of the data and further ids sampled evenly (data/read/multi_hot.py).
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
    """The share of all lookups that the `rank` most frequent ids have; between the curve's points ids are taken as equal."""
    after = bisect_right(curve.ranks, rank)
    if after == len(curve.ranks):
        return 1.0
    left, share = (curve.ranks[after - 1], curve.shares[after - 1]) if after else (0, 0.0)
    return share + (curve.shares[after] - share) * (rank - left) / (curve.ranks[after] - left)


def share_of_first(frequencies: RowFrequencies, num_ids: float) -> float:
    """The share of a table's lookups that its `num_ids` most frequent ids have."""
    rows, shares = frequencies.rows, frequencies.shares
    after = bisect_right(rows, num_ids)
    if after == 0:
        return 0.0
    if after == len(rows):
        return shares[-1]
    left, right = rows[after - 1], rows[after]
    return shares[after - 1] + (shares[after] - shares[after - 1]) * (num_ids - left) / (right - left)


def hashed_frequencies(frequencies: RowFrequencies | None, num_rows: int) -> RowFrequencies | None:
    """Estimate the frequencies of a part's rows whose ids are hashed; None where nothing is known of the table."""
    if frequencies is None:
        return None
    points = _points(num_rows)
    # The hottest ids lie in rows of their own, mostly; the others are even over all rows.
    shares = [first + (1 - first) * row / num_rows for row in points for first in [share_of_first(frequencies, row)]]
    return RowFrequencies(points, shares, by_row=False)


def digit_frequencies(
    frequencies: RowFrequencies | None, num_rows: int, stride: int, num_ids: int
) -> RowFrequencies | None:
    """Estimate the frequencies of a part's rows, id // stride % num_rows each; None where nothing is known."""
    if frequencies is None or not frequencies.by_row:
        return hashed_frequencies(frequencies, num_rows)
    points = _points(num_rows)
    return RowFrequencies(points, [_share_of_digits(frequencies, num_rows, stride, row, num_ids) for row in points])


def frequencies_of_block(frequencies: RowFrequencies | None, first: int, end: int) -> RowFrequencies | None:
    """Cut out the frequencies of ids first .. end - 1, which are rows of a table of their own."""
    if frequencies is None or not frequencies.by_row:
        return None
    before, all_ = share_of_first(frequencies, first), share_of_first(frequencies, end)
    if all_ <= before:
        return None
    points = _points(end - first)
    return RowFrequencies(
        points, [(share_of_first(frequencies, first + row) - before) / (all_ - before) for row in points]
    )


def share_of_block(frequencies: RowFrequencies | None, first: int, end: int, num_ids: int) -> float:
    """The share of a table's lookups that ids first .. end - 1 have; even over ids where nothing is known, or ids are hashed."""
    if frequencies is None or not frequencies.by_row:
        return (end - first) / num_ids
    return share_of_first(frequencies, end) - share_of_first(frequencies, first)


def _share_of_digits(frequencies: RowFrequencies, num_rows: int, stride: int, row: int, num_ids: int) -> float:
    """Lookups of the ids whose digit is below `row`: a run of row * stride ids in every stride * num_rows."""
    period = stride * num_rows
    runs = min(-(-num_ids // period), TERMS)
    share = sum(
        share_of_first(frequencies, begin + row * stride) - share_of_first(frequencies, begin)
        for begin in range(0, runs * period, period)
    )
    remaining = 1 - share_of_first(frequencies, runs * period)  # ids so rare that they are as good as even
    return min(1.0, share + remaining * row / num_rows)


def _points(num_rows: int) -> list[int]:
    """0, 1, 2, 4, ... and num_rows, with steps between where there is room."""
    points, row = {0, num_rows}, 1.0
    factor = max(1.2, num_rows ** (1 / (POINTS - 2))) if num_rows > 1 else 2.0
    while row < num_rows:
        points.add(int(row))
        row = max(row + 1, row * factor)
    return sorted(points)
