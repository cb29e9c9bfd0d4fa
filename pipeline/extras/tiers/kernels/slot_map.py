"""Map the rows of a table to the slots that hold some of them, and choose which rows leave, by kernels that Numba compiles.

A map is a hash table of slots: buckets [2^k] hold a slot or -1, row_of [slots] the row that a slot holds or -1. Collisions go to
the next bucket, and a row that leaves closes the gap behind it, so there are no tombstones. Victims are found by CLOCK: a hand goes
round the slots, takes one off each count that it passes, and stops where the count is 0 and no batch in flight needs the row.

Rows [0, head) have the slots of their own numbers, which are in no bucket and which the hand does not reach: they never leave.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.parts import part

U, int64 = np.uint64, np.int64
HASH = U(0x9E3779B97F4A7C15)
MOST = np.uint8(3)  # a row that recent batches had three times survives three rounds of the hand


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def find(row, buckets, row_of, head):  # type: ignore[no-untyped-def]
    """The slot of a row; -1: it has none."""
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
    """The slot that the row had."""
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
        if ((following - home) & mask) >= ((following - hole) & mask):  # it may stand in the hole
            buckets[hole] = slot
            hole = following
    buckets[hole] = -1
    return int64(gone)


@part()
def _victim(hand, row_of, visits, pins, head):  # type: ignore[no-untyped-def]
    """A slot that may be filled, free or not; -1: batches in flight need them all."""
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


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def resolve(ids, buckets, row_of, visits, pins, seen, now, head, slots, pinned, missing):  # type: ignore[no-untyped-def]
    """Pin what `ids` [n] has in slots, once a row, and fill slots [n]: -1 for a row that has none.

    seen [slots]: the call that last saw a slot; `now` is this one's. pinned [n]: the slots that were pinned. missing [n]: the
    ids without a slot. Returns how many of both there are.
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


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def admit(rows, buckets, row_of, visits, pins, dirty, hand, head, slots, victims, victim_slots):  # type: ignore[no-untyped-def]
    """Give each of `rows` [n], which have none, a pinned slot: slots [n]. Its weights and state are yet to be filled in.

    victims [n], victim_slots [n]: the rows that left and had changed, whose weights and state their slots still hold. Returns
    how many rows got a slot, which is fewer than n where batches in flight need all others; and the number of victims.
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


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def fill_in(ids, buckets, row_of, head, slots):  # type: ignore[no-untyped-def]
    """slots [n], where it is -1: of rows that have one now."""
    for position in range(len(ids)):
        if slots[position] < 0:
            slots[position] = find(ids[position], buckets, row_of, head)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def out_of_range(ids, num_rows):  # type: ignore[no-untyped-def]
    """The position of the first id that is no row; -1: there is none."""
    for position in range(len(ids)):
        if U(ids[position]) >= U(num_rows):  # a negative id is a large one
            return position
    return -1


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def release_head(head, buckets, row_of):  # type: ignore[no-untyped-def]
    """Rows [0, head), which are in their slots, become rows like others: they may leave."""
    for row in range(head):
        insert(row, row, buckets, row_of)
