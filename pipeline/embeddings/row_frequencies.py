"""Turn features' frequency curves into how a table's lookups fall on its rows (stdlib only).

Vocabulary ids come by descending frequency, so a table's first rows are its hottest. Hashed ids are scattered: then the
curve says how hot the hottest rows are, not where they lie.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pipeline.data.dataset import FrequencyCurve, SparseFeature


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
    """Of the table that embeds `features`; None where no curve says more than that all lookups fall on some row.

    `multi_hot`: features whose bags are one id of the data and further ids drawn evenly (data/multi_hot.py).
    """
    curves = [feature.frequency_curve for feature in features]
    if all(len(curve.ranks) < 2 for curve in curves) or not sum(pooling_factors):
        return None
    rows = sorted({0, *(rank for curve in curves for rank in curve.ranks)})
    shares = [0.0] * len(rows)
    for feature, factor in zip(features, pooling_factors, strict=True):
        drawn_evenly = 1 - 1 / max(1, multi_hot.get(feature.name, 1))
        for index, row in enumerate(rows):
            even = min(1.0, row / feature.cardinality)
            share = (1 - drawn_evenly) * share_of(feature.frequency_curve, row) + drawn_evenly * even
            shares[index] += factor / sum(pooling_factors) * share
    return RowFrequencies(rows, shares, all(feature.hash_size is None for feature in features))


def share_of(curve: FrequencyCurve, rank: int) -> float:
    """Of all lookups, those of the `rank` most frequent ids; between the curve's points ids are taken as equal."""
    after = bisect_right(curve.ranks, rank)
    if after == len(curve.ranks):
        return 1.0
    left, share = (curve.ranks[after - 1], curve.shares[after - 1]) if after else (0, 0.0)
    return share + (curve.shares[after] - share) * (rank - left) / (curve.ranks[after] - left)
