"""What the planner expects of tables in tiers: memory of their slots, hits, rows that a step brings in, stall."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from pipeline.config.tables import ConstraintConfig, InitConfig, TiersConfig, head_rows, num_slots
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.extras.tiers.forecast import (
    BYTES_A_STORED_ROW,
    MAP_BYTES_A_SLOT,
    POOL_BYTES_A_ROW,
    SLOTS_A_POOLED_ROW,
    forecast,
    io_ms,
    memory_bytes,
    stall_percent,
    tiered_step_ms,
)
from pipeline.extras.tiers.kernels import slot_map as slot_map_kernels

ROWS, BATCH = 4000, 256


def table(slots: float, frequencies: RowFrequencies | None = None, head: float = 0.0) -> Table:
    return Table(
        "t",
        ROWS,
        16,
        ["f"],
        "sum",
        "fp32",
        InitConfig(),
        ConstraintConfig(),
        [1.0],
        frequencies,
        tiers=TiersConfig(slots=slots, head=head),
    )


def zipf() -> tuple[RowFrequencies, np.ndarray]:
    weights = 1 / np.arange(1, ROWS + 1) ** 1.05
    shares = np.concatenate([[0], weights.cumsum() / weights.sum()])
    points = sorted({0, *np.geomspace(1, ROWS, 60).astype(int).tolist()})
    return RowFrequencies(points, [float(shares[point]) for point in points]), weights / weights.sum()


def simulate(slots: int, shares: np.ndarray, head: int) -> tuple[float, float]:
    """Hits of lookups and missing rows a step, of the map itself over random batches, once it is full."""
    rng = np.random.default_rng(0)
    buckets, row_of = np.full(1 << 14, -1, np.int32), np.full(slots, -1, np.int64)
    visits, dirty, pins = np.zeros(slots, np.uint8), np.zeros(slots, np.uint8), np.zeros(slots, np.int32)
    seen, hand = np.zeros(slots, np.int64), np.zeros(1, np.int64)
    row_of[:head] = np.arange(head)
    hits, missed, steps = 0, 0, 120
    for step in range(1, 60 + steps):
        ids = rng.choice(ROWS, BATCH, p=shares)
        found, pinned, missing = (np.empty(BATCH, np.int64) for _ in range(3))
        num_pinned, num_missing = slot_map_kernels.resolve(
            ids, buckets, row_of, visits, pins, seen, step, head, found, pinned, missing
        )
        rows = np.unique(missing[:num_missing])
        own, victims, victim_slots = (np.empty(len(rows), np.int64) for _ in range(3))
        count, _ = slot_map_kernels.admit(
            rows, buckets, row_of, visits, pins, dirty, hand, head, own, victims, victim_slots
        )
        assert count == len(rows)
        pins[pinned[:num_pinned]] -= 1
        pins[own] -= 1
        assert not pins.any()
        hits += (BATCH - num_missing) * (step >= 60)
        missed += len(rows) * (step >= 60)
    return hits / BATCH / steps, missed / steps


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("kind", ["zipf", "even", "head"])
def test_hits_and_rows_a_step_are_about_what_the_map_does(kind: str, share: float) -> None:
    frequencies, shares = zipf() if kind != "even" else (None, np.full(ROWS, 1 / ROWS))
    head = 0.5 if kind == "head" else 0.0
    expected = forecast(table(share, frequencies, head), BATCH)
    hit_rate, rows = simulate(int(share * ROWS), shares, head_rows(head, int(share * ROWS)))
    assert expected.hit_rate == pytest.approx(hit_rate, abs=0.04)
    assert expected.rows_a_step == pytest.approx(rows, rel=0.2)


def test_more_slots_serve_more_and_all_slots_serve_all() -> None:
    frequencies, _ = zipf()
    found = [forecast(table(share, frequencies), BATCH) for share in (0.05, 0.2, 0.6, 1.0)]
    assert all(one.hit_rate < other.hit_rate and one.rows_a_step > other.rows_a_step for one, other in pairwise(found))
    assert found[-1].hit_rate == pytest.approx(1, abs=0.01)


def test_a_head_of_hot_rows_serves_more() -> None:
    frequencies, _ = zipf()
    without, half, most = (forecast(table(0.1, frequencies, head), BATCH) for head in (0.0, 0.5, 0.95))
    assert without.hit_rate < half.hit_rate < most.hit_rate and without.rows_a_step > half.rows_a_step


def test_memory_is_that_of_slots_their_map_their_pool_and_the_places_of_rows() -> None:
    own = 500 * (128 + MAP_BYTES_A_SLOT + (128 + POOL_BYTES_A_ROW) / SLOTS_A_POOLED_ROW)
    assert memory_bytes(table(0.25), ROWS // 2, 128.0) == math.ceil(own + ROWS / 2 * BYTES_A_STORED_ROW)
    assert num_slots(1000, ROWS // 4, ROWS) == 250 and num_slots(0.1, 7, ROWS) == 1 and num_slots(1e9, 7, ROWS) == 7


def test_a_step_waits_only_where_reads_and_writes_take_longer_than_it() -> None:
    assert io_ms(1000, loads_per_s=50_000, stores_per_s=40_000) == pytest.approx(45)
    assert stall_percent(60, 45) == 0 and stall_percent(15, 40) == pytest.approx(62.5)
    assert stall_percent(15, 40, slowdown=2) == pytest.approx(25)
    assert tiered_step_ms(60, 45) == 60 and tiered_step_ms(15, 40, 2) == 40
    assert tiered_step_ms(60, 40, slowdown=2) == 80  # 40 at half of the speed, and 40 alone


def test_reads_that_take_sometimes_longer_make_a_step_wait_where_their_mean_would_not() -> None:
    rng = np.random.default_rng(0)
    for step, moving, slowdown, spread in [
        (40, 40, 1.0, 0.2),
        (40, 30, 1.0, 0.2),
        (20, 30, 1.4, 0.1),
        (20, 60, 1.4, 0.3),
    ]:
        computing = tiered_step_ms(step, moving, slowdown) - max(0.0, moving - slowdown * step)
        waits = np.maximum(moving * (1 + spread * rng.standard_normal(200_000)) - computing, 0).mean()
        assert stall_percent(step, moving, slowdown, spread) == pytest.approx(
            100 * waits / (computing + waits), rel=0.02
        )
        assert tiered_step_ms(step, moving, slowdown, spread) == pytest.approx(computing + waits, rel=0.01)
