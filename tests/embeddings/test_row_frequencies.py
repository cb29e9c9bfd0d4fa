from __future__ import annotations

import pytest

from pipeline.data.dataset import FrequencyCurve, SparseFeature
from pipeline.embeddings.row_frequencies import merge_frequencies, share_of

CURVE = FrequencyCurve([1, 10, 100], [0.5, 0.9, 1.0])


def feature(curve: FrequencyCurve, name: str = "f", hash_size: int | None = None) -> SparseFeature:
    return SparseFeature(name, curve.ranks[-1], False, 1.0, curve, hash_size=hash_size)


@pytest.mark.parametrize(
    ("rank", "share"), [(0, 0.0), (1, 0.5), (4, 0.5 + 0.4 / 3), (10, 0.9), (55, 0.95), (100, 1.0), (500, 1.0)]
)
def test_between_its_points_a_curve_is_straight(rank: int, share: float) -> None:
    assert share_of(CURVE, rank) == pytest.approx(share)


def test_a_tables_curve_is_its_features() -> None:
    merged = merge_frequencies([feature(CURVE)], [1.0], {})
    assert merged is not None and merged.by_row
    assert merged.rows == [0, 1, 10, 100] and merged.shares == pytest.approx([0.0, 0.5, 0.9, 1.0])


def test_features_of_one_table_weigh_by_their_ids_a_sample() -> None:
    even = feature(FrequencyCurve([50, 200], [0.25, 1.0]), "even")
    merged = merge_frequencies([feature(CURVE), even], [1.0, 3.0], {})
    assert merged is not None and merged.rows == [0, 1, 10, 50, 100, 200]
    assert merged.shares == pytest.approx(
        [
            0,
            (0.5 + 3 * 0.005) / 4,
            (0.9 + 3 * 0.05) / 4,
            *((share_of(CURVE, 50) + 3 * 0.25) / 4, (1 + 3 * 0.5) / 4, 1.0),
        ]
    )


def test_ids_that_multi_hot_draws_are_even() -> None:
    """Of a bag of 4 one id is the data's; see data/read/multi_hot.py."""
    merged = merge_frequencies([feature(CURVE)], [4.0], {"f": 4})
    assert merged is not None
    assert merged.shares == pytest.approx([0.0, (0.5 + 3 * 0.01) / 4, (0.9 + 3 * 0.1) / 4, 1.0])


def test_hashed_ids_are_not_in_order_of_frequency() -> None:
    merged = merge_frequencies([feature(CURVE, hash_size=100)], [1.0], {})
    assert merged is not None and not merged.by_row


def test_one_point_says_nothing() -> None:
    assert merge_frequencies([feature(FrequencyCurve([100], [1.0]))], [1.0], {}) is None
