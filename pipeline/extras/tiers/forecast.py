"""Predict the memory of a table with tiers, and how many of its rows a step reads from the SSD.

The forecast assumes LRU in Che's approximation (Che, Tung and Wang, IEEE JSAC 2002): a row has a
slot if it was among the last T lookups, where T lookups have as many distinct rows as there are
slots. The algorithm in use, CLOCK with counts, is slightly better. Rows of the head always have
slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pipeline.config.tables import head_rows, num_slots
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.planner.plan_record import TierForecast

# A slot's entries in the map: two to four buckets of 4 bytes, its row, when it was seen, pins,
# visits, dirty.
MAP_BYTES_A_SLOT = 38
SLOTS_A_POOLED_ROW = 32  # evicted rows wait in memory to be written together
POOL_BYTES_A_ROW = 32  # in addition to its record: the pool's map
BYTES_A_STORED_ROW = 2.2  # its place in the store's file, and a bit for each of 1.25 places
BISECTIONS = 80


def memory_bytes(table: Table, shard_rows: int, row_bytes: float) -> int:
    """Return the bytes that a shard needs for slots and their map, for waiting rows, and for the
    places of rows in the file.
    """
    assert table.tiers is not None
    slots = num_slots(table.tiers.slots, shard_rows, table.num_embeddings)
    pooled = (row_bytes + POOL_BYTES_A_ROW) / SLOTS_A_POOLED_ROW
    return math.ceil(slots * (row_bytes + MAP_BYTES_A_SLOT + pooled) + shard_rows * BYTES_A_STORED_ROW)


def forecast(table: Table, lookups_a_step: float) -> TierForecast:
    """Return the forecast. lookups_a_step: the lookups of all ranks together in one step."""
    assert table.tiers is not None
    slots = num_slots(table.tiers.slots, table.num_embeddings, table.num_embeddings)
    head = head_rows(table.tiers.head or 0.0, slots)
    parts = _after(head, _parts(table.frequencies, table.num_embeddings))
    lasting = _lasting(parts, slots - head)
    absent = [math.exp(-share * lasting) for _, share in parts]
    missed = sum(count * share * away for (count, share), away in zip(parts, absent, strict=True))
    wanted = [count * -math.expm1(-share * lookups_a_step) for count, share in parts]
    rows = sum(count * away for count, away in zip(wanted, absent, strict=True))
    return TierForecast(slots, 1 - missed, rows)


def _parts(frequencies: RowFrequencies | None, num_rows: int) -> list[tuple[float, float]]:
    """Return (rows, share of the lookups of each of these rows). Without frequencies the lookups are uniform."""
    if frequencies is None:
        return [(num_rows, 1 / num_rows)]
    points = [*zip(frequencies.rows, frequencies.shares, strict=True)]
    if points[0][0] > 0:
        points.insert(0, (0, 0.0))
    parts = []
    for (begin, before), (end, after) in pairwise(points):
        if end > begin:
            parts.append((float(end - begin), max(0.0, after - before) / (end - begin)))
    return parts


def distinct_rows(table: Table, lookups: float) -> float:
    """Return the expected number of distinct rows in this many lookups."""
    parts = _parts(table.frequencies, table.num_embeddings)
    return sum(count * -math.expm1(-share * lookups) for count, share in parts)


def _after(head: int, parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the parts without the first `head` rows."""
    found, first = [], 0.0
    for count, share in parts:
        if (remaining := min(count, first + count - head)) > 0:
            found.append((remaining, share))
        first += count
    return found


def _lasting(parts: Sequence[tuple[float, float]], slots: int) -> float:
    """Return after how many lookups a row loses its slot."""

    def held(lasting: float) -> float:
        return sum(count * -math.expm1(-share * lasting) for count, share in parts)

    low, high = 0.0, 1.0
    while held(high) < slots and high < 1e18:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < slots else (low, middle)
    return low


def io_ms(rows_a_step: float, loads_per_s: float, stores_per_s: float) -> float:
    """Return the I/O time of a step that loads rows and evicts the same number of rows, all of which have changed."""
    return 1000 * rows_a_step * (1 / loads_per_s + 1 / stores_per_s)


def stall_percent(step_ms: float, io_ms: float, slowdown: float = 1.0, spread: float = 0.0) -> float:
    """Return the percentage of a step's time in which it waits for rows. step_ms: the step's time
    without tiers.

    slowdown: the factor by which the step computes slower during I/O, because the reading thread
    may share its core. spread: the relative standard deviation of io_ms.
    """
    return 100 * _wait_ms(step_ms, io_ms, slowdown, spread) / tiered_step_ms(step_ms, io_ms, slowdown, spread)


def tiered_step_ms(step_ms: float, io_ms: float, slowdown: float = 1.0, spread: float = 0.0) -> float:
    """Return the time of a step with its stall. It computes slower during I/O."""
    return _computing_ms(step_ms, io_ms, slowdown) + _wait_ms(step_ms, io_ms, slowdown, spread)


def _computing_ms(step_ms: float, io_ms: float, slowdown: float) -> float:
    return step_ms + min(io_ms, slowdown * step_ms) * (1 - 1 / slowdown)


def _wait_ms(step_ms: float, io_ms: float, slowdown: float, spread: float) -> float:
    """Return the mean time by which I/O takes longer than the computation. The I/O time is assumed
    to be normally distributed.
    """
    excess, deviation = io_ms - _computing_ms(step_ms, io_ms, slowdown), spread * io_ms
    if deviation <= 0:
        return max(0.0, excess)
    ratio = excess / deviation
    density = math.exp(-ratio * ratio / 2) / math.sqrt(2 * math.pi)
    return deviation * density + excess * 0.5 * (1 + math.erf(ratio / math.sqrt(2)))
