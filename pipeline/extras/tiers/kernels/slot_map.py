"""Map rows of a table to slots, and choose which rows to evict, by kernels that Numba compiles.

A map is a hash table of slots: buckets [2^k] contain a slot or -1, and row_of [slots] contains the
row of a slot or -1. After a collision the next bucket is used. Removing a row closes its gap, so
there are no tombstones. The CLOCK algorithm chooses the rows to evict: a hand moves over the slots,
reduces each count by one, and stops at a count of 0 if no batch in flight needs the row.

Rows [0, head) have the slots with their own numbers. These slots are in no bucket and are never
evicted.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.parts import part

U, int64 = np.uint64, np.int64
HASH = U(0x9E3779B97F4A7C15)
MOST = np.uint8(3)  # a row that recent batches had three times survives three rounds of the hand


@njit(nogil=True, cache=True)
def find(row, buckets, row_of, head):  # type: ignore[no-untyped-def]
    """Return the slot of a row, or -1."""
    if row < head:
        return int64(row)
    mask = U(len(buckets) - 1)
    bucket = ((U(row) * HASH) >> U(24)) & mask
    while True:
        slot = buckets[bucket]
        if slot < 0:
            return int64(-1)
        if row_of[slot] == row:
            return int64(slot)
        bucket = (bucket + U(1)) & mask


@part()
def insert(row, slot, buckets, row_of):  # type: ignore[no-untyped-def]
    mask = U(len(buckets) - 1)
    bucket = ((U(row) * HASH) >> U(24)) & mask
    while buckets[bucket] >= 0:
        bucket = (bucket + U(1)) & mask
    buckets[bucket] = slot
    row_of[slot] = row


@part()
def remove(row, buckets, row_of):  # type: ignore[no-untyped-def]
    """Remove a row and return its slot."""
    mask = U(len(buckets) - 1)
    hole = ((U(row) * HASH) >> U(24)) & mask
    while row_of[buckets[hole]] != row:
        hole = (hole + U(1)) & mask
    gone = buckets[hole]
    row_of[gone] = -1
    following = hole
    while True:
        following = (following + U(1)) & mask
        slot = buckets[following]
        if slot < 0:
            break
        home = ((U(row_of[slot]) * HASH) >> U(24)) & mask
        if ((following - home) & mask) >= ((following - hole) & mask):  # it may move into the gap
            buckets[hole] = slot
            hole = following
    buckets[hole] = -1
    return int64(gone)


@part()
def _victim(hand, row_of, visits, pins, head):  # type: ignore[no-untyped-def]
    """Return a free slot, or a slot whose row may be evicted; -1 if batches in flight need all slots."""
    count = len(row_of)
    for _ in range((int64(MOST) + 2) * (count - head)):
        slot = max(hand[0], head)
        hand[0] = slot + 1 if slot + 1 < count else head
        if row_of[slot] < 0:
            return int64(slot)
        if pins[slot] == 0:
            if visits[slot] == 0:
                return int64(slot)
            visits[slot] -= np.uint8(1)
    return int64(-1)


@njit(nogil=True, cache=True)
def resolve(ids, buckets, row_of, visits, pins, seen, now, head, slots, pinned, missing):  # type: ignore[no-untyped-def]
    """Pin the slots of `ids` [n], once per row. Set slots [n], to -1 for a row without a slot.

    seen [slots]: the number of the last call that used a slot; `now` is the number of this call.
    pinned [n]: the pinned slots. missing [n]: the ids without a slot. Returns the lengths of pinned
    and missing.
    """
    num_pinned, num_missing = 0, 0
    for position in range(len(ids)):
        slot = find(ids[position], buckets, row_of, head)
        slots[position] = slot
        if slot < 0:
            missing[num_missing] = ids[position]
            num_missing += 1
        elif seen[slot] != now:
            seen[slot] = now
            pins[slot] += 1
            visits[slot] = min(visits[slot] + np.uint8(1), MOST)
            pinned[num_pinned] = slot
            num_pinned += 1
    return num_pinned, num_missing


@njit(nogil=True, cache=True)
def admit(rows, buckets, row_of, visits, pins, dirty, hand, head, slots, victims, victim_slots):  # type: ignore[no-untyped-def]
    """Give each of `rows` [n], which have no slot, a pinned slot in slots [n].

    Weights and states of the slots are set later.

    victims [n], victim_slots [n]: the evicted rows that had changed, whose weights and states are
    still in their slots. Returns how many rows got a slot (fewer than n if batches in flight need
    all slots), and the number of victims.
    """
    num_victims = 0
    for position in range(len(rows)):
        slot = _victim(hand, row_of, visits, pins, head)
        if slot < 0:
            return position, num_victims
        if row_of[slot] >= 0:
            if dirty[slot]:
                victims[num_victims], victim_slots[num_victims] = row_of[slot], slot
                num_victims += 1
            remove(row_of[slot], buckets, row_of)
        insert(rows[position], slot, buckets, row_of)
        visits[slot], pins[slot], dirty[slot] = 0, 1, 0
        slots[position] = slot
    return len(rows), num_victims


@njit(nogil=True, cache=True)
def fill_in(ids, buckets, row_of, head, slots):  # type: ignore[no-untyped-def]
    """Replace each -1 in slots [n] whose row has a slot now."""
    for position in range(len(ids)):
        if slots[position] < 0:
            slots[position] = find(ids[position], buckets, row_of, head)


@njit(nogil=True, cache=True)
def out_of_range(ids, num_rows):  # type: ignore[no-untyped-def]
    """Return the position of the first id that is not a row; -1 if all ids are rows."""
    for position in range(len(ids)):
        if U(ids[position]) >= U(num_rows):  # a negative id becomes a large one
            return position
    return -1


@njit(nogil=True, cache=True)
def release_head(head, buckets, row_of):  # type: ignore[no-untyped-def]
    """Allow the eviction of rows [0, head). Their slots are then found through buckets."""
    for row in range(head):
        insert(row, row, buckets, row_of)
