"""How lookups fall on the rows of a table's parts, beside a count of every id."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.config.tables import CompressionConfig, ConstraintConfig, InitConfig
from pipeline.embeddings.id_splitter import hashed_to
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.row_frequencies import (
    RowFrequencies,
    frequencies_of_block,
    hashed_frequencies,
    share_of_block,
)
from pipeline.embeddings.table import Table
from pipeline.extras.compression.describe import savings_of
from pipeline.extras.compression.digits import digit_frequencies
from pipeline.extras.compression.quotient_remainder import Digit

NUM_IDS = 10_000
LOOKUPS: NDArray[np.float64] = 1 / np.arange(1, NUM_IDS + 1)
LOOKUPS = LOOKUPS / LOOKUPS.sum()
RANKS = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, NUM_IDS]
CURVE = RowFrequencies(RANKS, [float(LOOKUPS[:rank].sum()) for rank in RANKS])


@pytest.mark.parametrize(
    "partition", [Digit("remainder", 100), Digit("quotient", 100, 100), Digit("digit_1", 20, 25), Digit("mod_997", 997)]
)
def test_a_digits_curve_is_that_of_all_ids_that_share_its_rows(partition: Digit) -> None:
    found = digit_frequencies(CURVE, partition.num_classes, partition.stride, NUM_IDS)
    assert found is not None
    assert found.by_row
    counted = np.bincount(partition.classes_of(np.arange(NUM_IDS)), LOOKUPS, minlength=partition.num_classes)
    for row, share in zip(found.rows, found.shares, strict=True):
        assert share == pytest.approx(counted[:row].sum(), abs=0.03)
    assert (found.rows[0], found.shares[0], found.rows[-1]) == (0, 0.0, partition.num_classes)
    assert found.shares[-1] == pytest.approx(1.0)


def test_a_remainders_curve_is_flatter_than_the_tables() -> None:
    found = digit_frequencies(CURVE, 100, 1, NUM_IDS)
    assert found is not None
    assert found.shares[found.rows.index(1)] < 2 * float(LOOKUPS[0])
    assert np.interp(50, found.rows, found.shares) < np.interp(5000, CURVE.rows, CURVE.shares)


def test_a_hashed_curve_says_how_hot_the_hottest_rows_are_and_not_where_they_lie() -> None:
    found = hashed_frequencies(CURVE, 500)
    assert found is not None
    assert not found.by_row
    counted = np.bincount(hashed_to(500, 3, np.arange(NUM_IDS)), LOOKUPS, minlength=500)
    hottest = np.cumsum(np.sort(counted)[::-1])
    for row in (1, 10, 100):
        assert np.interp(row, found.rows, found.shares) == pytest.approx(hottest[row - 1], abs=0.1)


def test_a_blocks_curve_and_share_are_those_of_its_ids() -> None:
    found = frequencies_of_block(CURVE, 128, 1024)
    assert found is not None
    inside = LOOKUPS[128:1024]
    assert share_of_block(CURVE, 128, 1024, NUM_IDS) == pytest.approx(inside.sum(), abs=1e-6)
    for row, share in zip(found.rows, found.shares, strict=True):
        assert share == pytest.approx(inside[:row].sum() / inside.sum(), abs=0.03)


def table_of(config: CompressionConfig) -> Table:
    return Table(
        "t", NUM_IDS, 16, ["f"], "sum", "fp32", InitConfig(), ConstraintConfig(), [3.0], frequencies=CURVE,
        compression=config, max_ids=[3],
    )  # fmt: skip


def test_blocks_share_out_the_lookups_of_a_table() -> None:
    parts = physical_tables([table_of(CompressionConfig("mixed_dimension", ratio=3))])
    assert [part.embedding_dim for part in parts] == sorted((part.embedding_dim for part in parts), reverse=True)
    assert sum(part.pooling_factors[0] for part in parts) == pytest.approx(3.0)
    assert parts[0].pooling_factors[0] > parts[0].num_embeddings / NUM_IDS * 3.0


def test_collisions_are_counted_id_by_id_and_by_lookups() -> None:
    table = table_of(CompressionConfig("hash", num_rows=800, seed=5))
    (found,) = savings_of([table])
    rows = hashed_to(800, 5, np.arange(NUM_IDS))
    counts = np.bincount(rows, minlength=800)
    of_ids = np.diff(np.interp(np.arange(NUM_IDS + 1), CURVE.rows, CURVE.shares))
    first = np.unique(rows, return_index=True)[1]
    assert found.collisions is not None
    assert found.collisions.ids == pytest.approx((counts[rows] > 1).mean())
    assert found.collisions.lookups == pytest.approx(of_ids[counts[rows] > 1].sum())
    assert found.collisions.lookups_of_others == pytest.approx(1 - of_ids[first].sum())
    assert found.full_bytes == NUM_IDS * 16 * 4
    assert found.table_bytes == 800 * 16 * 4
