"""Predict what a table in tiers takes of memory, and how many of its rows a step reads from the SSD.

A row is taken to keep its slot as under LRU in Che's approximation (Che, Tung and Wang, IEEE JSAC 2002): it is there if it was
looked up among the last T lookups, and T is as long as the slots hold the rows of so many. CLOCK with counts does a little better.
Rows of the head are always there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.config.tables import head_rows, num_slots
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table

# A slot's entries in the map: two to four buckets of 4 bytes, its row, when it was seen, pins, visits, dirty.
MAP_BYTES_A_SLOT = 38
BLOCK_BYTES = 4096
BISECTIONS = 80


@dataclass(frozen=True)
class TierForecast:
    """Of a whole table in a steady state: lookups served from slots, and distinct rows that a step brings in."""

    slots: int
    hit_rate: float
    rows_a_step: float

    @property
    def read_bytes(self) -> float:
        """Of a step: a block for each row that comes in, and one for each that leaves, where other rows lie too."""
        return 2 * BLOCK_BYTES * self.rows_a_step


def memory_bytes(table: Table, shard_rows: int, row_bytes: float) -> int:
    """What the slots of a shard take, with their map and a bit for each row."""
    assert table.tiers is not None
    slots = num_slots(table.tiers.slots, shard_rows, table.num_embeddings)
    return math.ceil(slots * (row_bytes + MAP_BYTES_A_SLOT) + shard_rows / 8)


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


def stall_percent(step_ms: float, io_ms: float, slowdown: float = 1.0) -> float:
    """Of a step that takes `step_ms` without tiers: what it waits for rows.

    slowdown: while rows come and go the step computes slower by it, as where the threads that read share its core.
    """
    return 100 * max(0.0, 1 - slowdown * step_ms / io_ms) if io_ms > 0 else 0.0


def tiered_step_ms(step_ms: float, io_ms: float, slowdown: float = 1.0) -> float:
    """What a step takes, its stall included: it computes slower for as long as rows come and go."""
    return max(io_ms, step_ms + min(io_ms, slowdown * step_ms) * (1 - 1 / slowdown))
