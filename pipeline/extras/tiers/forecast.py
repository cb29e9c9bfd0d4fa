"""Predict what a table in tiers takes of memory, and how many of its rows a step reads from the SSD.

A row is taken to keep its slot as under LRU in Che's approximation (Che, Tung and Wang, IEEE JSAC 2002): it is there if it was
looked up among the last T lookups, and T is as long as the slots hold the rows of so many. CLOCK with counts does a little better.
Rows of the head are always there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pipeline.config.tables import head_rows, num_slots
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.planner.plan_record import TierForecast

# A slot's entries in the map: two to four buckets of 4 bytes, its row, when it was seen, pins, visits, dirty.
MAP_BYTES_A_SLOT = 38
SLOTS_A_POOLED_ROW = 32  # rows that have left their slots wait in memory, to be written together
POOL_BYTES_A_ROW = 32  # beside its record: the pool's map
BYTES_A_STORED_ROW = 2.2  # its place in the store's file, and a bit for each of 1.25 places
BISECTIONS = 80


def memory_bytes(table: Table, shard_rows: int, row_bytes: float) -> int:
    """What the slots of a shard take, with their map, the rows that wait to be written, and where each row lies."""
    assert table.tiers is not None
    slots = num_slots(table.tiers.slots, shard_rows, table.num_embeddings)
    pooled = (row_bytes + POOL_BYTES_A_ROW) / SLOTS_A_POOLED_ROW
    return math.ceil(slots * (row_bytes + MAP_BYTES_A_SLOT + pooled) + shard_rows * BYTES_A_STORED_ROW)


def forecast(table: Table, lookups_a_step: float) -> TierForecast:
    """`lookups_a_step`: of all ranks together."""
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
    """(rows, share of the lookups that each of them has); even where nothing is known."""
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
    """Of so many lookups."""
    parts = _parts(table.frequencies, table.num_embeddings)
    return sum(count * -math.expm1(-share * lookups) for count, share in parts)


def _after(head: int, parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the first `head` rows."""
    found, first = [], 0.0
    for count, share in parts:
        if (remaining := min(count, first + count - head)) > 0:
            found.append((remaining, share))
        first += count
    return found


def _lasting(parts: Sequence[tuple[float, float]], slots: int) -> float:
    """How many lookups ago a row may have been seen and still be there."""

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
    """Of a step where as many rows come in as leave, all of them changed."""
    return 1000 * rows_a_step * (1 / loads_per_s + 1 / stores_per_s)


def stall_percent(step_ms: float, io_ms: float, slowdown: float = 1.0, spread: float = 0.0) -> float:
    """Of a step that takes `step_ms` without tiers: what it waits for rows.

    slowdown: while rows come and go the step computes slower by it, as where the thread that reads shares its core. spread: the standard
    deviation of io_ms, as a share of it.
    """
    return 100 * _wait_ms(step_ms, io_ms, slowdown, spread) / tiered_step_ms(step_ms, io_ms, slowdown, spread)


def tiered_step_ms(step_ms: float, io_ms: float, slowdown: float = 1.0, spread: float = 0.0) -> float:
    """What a step takes, its stall included: it computes slower for as long as rows come and go."""
    return _computing_ms(step_ms, io_ms, slowdown) + _wait_ms(step_ms, io_ms, slowdown, spread)


def _computing_ms(step_ms: float, io_ms: float, slowdown: float) -> float:
    return step_ms + min(io_ms, slowdown * step_ms) * (1 - 1 / slowdown)


def _wait_ms(step_ms: float, io_ms: float, slowdown: float, spread: float) -> float:
    """The mean of what rows take longer than the step computes, where their time is normally distributed."""
    excess, deviation = io_ms - _computing_ms(step_ms, io_ms, slowdown), spread * io_ms
    if deviation <= 0:
        return max(0.0, excess)
    ratio = excess / deviation
    density = math.exp(-ratio * ratio / 2) / math.sqrt(2 * math.pi)
    return deviation * density + excess * 0.5 * (1 + math.erf(ratio / math.sqrt(2)))
