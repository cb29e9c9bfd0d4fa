"""Place the records of a row store in its file, and copy them from and to slots, by kernels that
Numba compiles.

A record is a row's weights and its optimizer's states, float32. Neighbouring rows share a region of
the file, which has more places than rows. The place of a record changes with each write: records
that are written together take the free places of one segment, the emptiest one, so that many rows
from anywhere in the table are one write. A shard has

    place [rows]: 0: not stored; POOLED: waits in memory; otherwise FIRST + its place in the region
    taken: a bit for each place of the file.  num_taken [segments]: taken places of each segment
    layout: rows per region; places per region, segment and unit; bytes of a region, unit and record; segments per region

A unit is a block of the file, or several blocks if a record is longer. A record is in one unit.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.parts import part
from pipeline.extras.tiers.kernels.slot_map import find, insert, remove

int64 = np.int64
POOLED, FIRST = 1, 2
MAX_PLACES = 0xFFFF - FIRST


@njit(nogil=True, cache=True)
def gather(slots, weights, states, squares, records):  # type: ignore[no-untyped-def]
    """Copy the slots [n] into records [n, numbers per record]."""
    dim, second = weights.shape[1], weights.shape[1] + states.shape[1]
    for position in range(len(slots)):
        slot = slots[position]
        records[position, :dim] = weights[slot]
        records[position, dim:second] = states[slot]
        records[position, second:] = squares[slot]


@njit(nogil=True, cache=True)
def scatter(numbers, at, slots, weights, states, squares):  # type: ignore[no-untyped-def]
    """Copy the records that begin at numbers[at] into the slots [n] of each column."""
    dim, second = weights.shape[1], states.shape[1]
    for position in range(len(slots)):
        slot, begin = slots[position], at[position]
        weights[slot] = numbers[begin : begin + dim]
        states[slot] = numbers[begin + dim : begin + dim + second]
        squares[slot] = numbers[begin + dim + second : begin + dim + second + squares.shape[1]]


@njit(nogil=True, cache=True)
def fill_records(numbers, at, records):  # type: ignore[no-untyped-def]
    """Do the opposite of scatter: copy slots into records [n, numbers per record]."""
    for position in range(len(at)):
        numbers[at[position] : at[position] + records.shape[1]] = records[position]


@njit(nogil=True, cache=True)
def set_bits(bits, rows):  # type: ignore[no-untyped-def]
    for row in rows:
        bits[row >> 3] |= np.uint8(1) << np.uint8(row & 7)


@njit(nogil=True, cache=True)
def stored_bits(place, bits):  # type: ignore[no-untyped-def]
    """Set the bits of the rows that are stored."""
    for row in range(len(place)):
        if place[row] != 0:
            bits[row >> 3] |= np.uint8(1) << np.uint8(row & 7)


@njit(nogil=True, cache=True)
def locate(rows, place, layout, offsets):  # type: ignore[no-untyped-def]
    """Set offsets [n] to the byte position of each row's record in the file, or -1 if the record
    waits in memory. All rows must be stored.
    """
    rows_a_region, _, _, rows_a_unit, region_bytes, unit_bytes, record_bytes, _ = layout
    for position in range(len(rows)):
        row = rows[position]
        at = int64(place[row]) - FIRST
        if at < 0:
            offsets[position] = -1
        else:
            within = at // rows_a_unit * unit_bytes + at % rows_a_unit * record_bytes
            offsets[position] = row // rows_a_region * region_bytes + within


@njit(nogil=True, cache=True)
def plan_reads(offsets, first, record_bytes, sector, most_gap, most_bytes, span_offsets, span_sizes, at):  # type: ignore[no-untyped-def]
    """Find spans of complete sectors that contain the records at offsets [n] (ascending), from
    position `first` on, until the spans have most_bytes.

    Records with at most most_gap bytes between them share a span. Spans are adjacent in memory. at
    [n] gets the position of each record in this memory, counted in numbers. Returns the position
    after the last record, the number of spans, and their bytes.
    """
    num_spans, total, position = 0, 0, first
    while position < len(offsets):
        begin = offsets[position] // sector * sector
        end = -(-(offsets[position] + record_bytes) // sector) * sector
        if num_spans and begin <= span_offsets[num_spans - 1] + span_sizes[num_spans - 1] + most_gap:
            span = num_spans - 1
            more = max(0, end - span_offsets[span] - span_sizes[span])
            if total + more > most_bytes:
                break
            span_sizes[span] += more
            total += more
        else:
            if total + end - begin > most_bytes and num_spans:
                break
            span = num_spans
            span_offsets[span], span_sizes[span] = begin, end - begin
            total += end - begin
            num_spans += 1
        at[position] = (total - span_sizes[span] + offsets[position] - span_offsets[span]) // 4
        position += 1
    return position, num_spans, total


@part()
def _is_set(bits, at):  # type: ignore[no-untyped-def]
    return (bits[at >> 3] >> np.uint8(at & 7)) & np.uint8(1) != 0


@part()
def _emptiest(num_taken, region, segments):  # type: ignore[no-untyped-def]
    best = region * segments
    for segment in range(region * segments, (region + 1) * segments):
        if num_taken[segment] < num_taken[best]:
            best = segment
    return best


@njit(nogil=True, cache=True)
def plan_writes(rows, first, layout, place, taken, num_taken, most_bytes, span_offsets, span_sizes, is_read, at):  # type: ignore[no-untyped-def]
    """Give places to rows [n] (ascending, not stored), from position `first` on, until the spans
    have most_bytes or their maximum number.

    Spans are adjacent in memory. at [n] gets the position of each record in this memory, counted in
    numbers. is_read: spans with other records, which must be read before they are written. Returns
    the position after the last row, the number of spans, and their bytes.
    """
    rows_a_region, places_a_region, places_a_segment, rows_a_unit, region_bytes, unit_bytes, record_bytes, segments = (
        layout
    )
    num_spans, total, position = 0, 0, first
    while position < len(rows) and num_spans < len(span_offsets):
        if total + places_a_segment // rows_a_unit * unit_bytes > most_bytes:
            break
        region = rows[position] // rows_a_region
        segment = _emptiest(num_taken, region, segments)
        begins = segment % segments * places_a_segment
        first_unit, last_unit, has_others = -1, -1, False
        for unit in range(begins // rows_a_unit, (begins + places_a_segment) // rows_a_unit):
            is_used = False
            for within in range(rows_a_unit):
                bit = region * places_a_region + unit * rows_a_unit + within
                if _is_set(taken, bit):
                    is_used = True
                elif position < len(rows) and rows[position] // rows_a_region == region:
                    if first_unit < 0:
                        first_unit = unit
                    last_unit = unit
                    taken[bit >> 3] |= np.uint8(1) << np.uint8(bit & 7)
                    num_taken[segment] += 1
                    place[rows[position]] = unit * rows_a_unit + within + FIRST
                    at[position] = (total + (unit - first_unit) * unit_bytes + within * record_bytes) // 4
                    position += 1
            has_others = has_others or (is_used and last_unit == unit)
            if position == len(rows) or rows[position] // rows_a_region != region:
                break
            has_others = has_others or (is_used and first_unit >= 0)
        span_offsets[num_spans] = region * region_bytes + first_unit * unit_bytes
        span_sizes[num_spans] = (last_unit + 1 - first_unit) * unit_bytes
        is_read[num_spans] = has_others
        total += span_sizes[num_spans]
        num_spans += 1
    return position, num_spans, total


@part()
def _leave(row, place, taken, num_taken, layout):  # type: ignore[no-untyped-def]
    """Free the place that a row has in the file."""
    rows_a_region, places_a_region, places_a_segment, _, _, _, _, segments = layout
    region, at = row // rows_a_region, int64(place[row]) - FIRST
    bit = region * places_a_region + at
    taken[bit >> 3] &= ~(np.uint8(1) << np.uint8(bit & 7))
    num_taken[region * segments + at // places_a_segment] -= 1
    place[row] = 0


@njit(nogil=True, cache=True)
def leave(rows, place, taken, num_taken, layout, buckets, pool_rows, free, waiting):  # type: ignore[no-untyped-def]
    """Remove rows from the file and from the pool."""
    for row in rows:
        if place[row] == POOLED:
            free[0] += 1
            free[free[0]] = remove(row, buckets, pool_rows)
            waiting[row // layout[0]] -= 1
            place[row] = 0
        elif place[row] != 0:
            _leave(row, place, taken, num_taken, layout)


@njit(nogil=True, cache=True)
def pool(rows, first, records, place, taken, num_taken, layout, buckets, pool_rows, pool_records, free, waiting):  # type: ignore[no-untyped-def]
    """Put records [n, numbers] of rows into the pool from position `first` on.

    Return the position where the pool is full.

    pool_rows, pool_records: the row and the record in each place of the pool. buckets: the map from
    rows to places, as in slot_map. free [1 + places]: how many places are free, and which. waiting
    [regions]: how many rows of each region are in the pool.
    """
    for position in range(first, len(rows)):
        row = rows[position]
        if place[row] == POOLED:
            pool_records[find(row, buckets, pool_rows, 0)] = records[position]
            continue
        if free[0] == 0:
            return position
        if place[row] != 0:
            _leave(row, place, taken, num_taken, layout)
        at = free[free[0]]
        free[0] -= 1
        insert(row, at, buckets, pool_rows)
        pool_records[at] = records[position]
        place[row] = POOLED
        waiting[row // layout[0]] += 1
    return len(rows)


@njit(nogil=True, cache=True)
def find_pooled(rows, buckets, pool_rows, at):  # type: ignore[no-untyped-def]
    """Set at [n] to the places of `rows` in the pool."""
    for position in range(len(rows)):
        at[position] = find(rows[position], buckets, pool_rows, 0)


@njit(nogil=True, cache=True)
def choose_regions(waiting, least, rows_a_region, pool_rows, chosen):  # type: ignore[no-untyped-def]
    """Choose regions with the most rows in the pool, until they have `least` rows. Write these rows
    to chosen [pool] and return their number.
    """
    left = waiting.copy()
    total = 0
    while total < least:
        region = np.argmax(left)
        if left[region] == 0:
            break
        total += left[region]
        left[region] = -1
    count = 0
    for row in pool_rows:
        if row >= 0 and left[row // rows_a_region] < 0:
            chosen[count] = row
            count += 1
    return count
