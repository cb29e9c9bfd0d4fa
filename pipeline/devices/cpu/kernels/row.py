"""Find the distinct rows of a batch, and group the gradients of each row, which are then summed.

A table of slots finds the rows. The bags of each row are then stored one after the other in a fixed
order, so sums do not depend on threads. Gradients are first copied together, because in the batch's
array they are a page apart.

Shapes: F features, B samples, L ids, D the width of a row. Every index is unsigned, as in
update.py.
"""

from __future__ import annotations

import numpy as np

from pipeline.devices.cpu.kernels.llvm_intrinsics import prefetch_to_write
from pipeline.devices.cpu.kernels.parts import move, part

U = np.uint64
HASH = U(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: multiplicative hashing (Knuth, TAOCP 3, 6.4)
AHEAD = 8  # rows


@part()
def buffer_sizes(units, feature_begins, offsets, columns, num_samples):  # type: ignore[no-untyped-def]
    """Return the largest number of ids, and of gradient values, of any table in `units`."""
    longest, most = U(0), U(0)
    for unit in range(len(units)):
        table = U(units[unit, 0])
        begin, end = U(feature_begins[table]), U(feature_begins[table + U(1)])
        longest = max(longest, U(offsets[end * num_samples]) - U(offsets[begin * num_samples]))
        most = max(most, U(columns[end] - columns[begin]) * num_samples)
    return longest, most


@part()
def own_ids(  # type: ignore[no-untyped-def]
    indices, offsets, factors, first_bag, last_bag, is_mean, part, num_parts, ids, bags, scales
):  # fmt: skip
    """Write the part's ids, their bags (counted from the first) and factors. Return their number
    and the largest id.

    num_parts: a power of two, at most 64; a hash of the row chooses its part. The arrays need space
    for one more id than there are.
    """
    count, largest, is_weighted = U(0), U(0), len(factors) > 0
    for bag in range(first_bag, last_bag):
        first, last = U(offsets[bag]), U(offsets[bag + U(1)])
        scale = np.float32(1)
        if is_mean and last > first:
            scale = np.float32(1) / np.float32(last - first)
        for position in range(first, last):
            row = U(indices[position])
            is_own = (row * HASH) >> U(58) & (num_parts - U(1)) == part
            ids[count], bags[count] = row, bag - first_bag
            if is_weighted:
                scales[count] = scale * factors[position]
            elif is_mean:
                scales[count] = scale
            largest = max(largest, row if is_own else U(0))
            count += U(is_own)
    return count, largest


@part()
def find_rows(ids, count, largest, slots, rows, counts, entries):  # type: ignore[no-untyped-def]
    """Write the distinct ids of ids[:count] to `rows`, their counts, and each id's entry. Return
    the number of rows.

    If ids are small enough, the slot of a row is its id. Frequent rows have small ids, so their
    slots stay in the cache. Otherwise the slots are a hash table.
    """
    distinct = U(0)
    counts[:count] = 0
    if largest < U(4) * count:
        slots[: largest + U(1)] = -1
        for at in range(count):
            row = ids[at]
            entry = slots[row]
            is_new = entry < 0
            entry = np.int32(distinct) if is_new else entry
            slots[row], rows[U(entry)], entries[at] = entry, row, entry
            counts[U(entry)] += 1
            distinct += U(is_new)
        return distinct
    size = U(16)
    while size < U(2) * count:
        size *= U(2)
    mask = size - U(1)
    slots[:size] = -1
    for at in range(count):
        if at + U(AHEAD) < count:
            prefetch_to_write(slots, ((ids[at + U(AHEAD)] * HASH) >> U(32)) & mask)
        row = ids[at]
        slot = ((row * HASH) >> U(32)) & mask
        while slots[slot] >= 0 and rows[U(slots[slot])] != row:
            slot = (slot + U(1)) & mask
        if slots[slot] < 0:
            slots[slot] = distinct
            rows[distinct] = row
            distinct += U(1)
        entries[at] = slots[slot]
        counts[U(slots[slot])] += 1
    return distinct


@part()
def sort_bags(bags, scales, entries, count, distinct, has_scales, ends, order, factors):  # type: ignore[no-untyped-def]
    """Write the bags of each row to `order`, row by row, with their factors.

    ends: on entry the count of each row, on return the end of each row in `order`.
    """
    total = U(0)
    for entry in range(distinct):
        number = U(ends[entry])
        ends[entry] = total
        total += number
    for at in range(count):
        entry = U(entries[at])
        place = U(ends[entry])
        order[place] = bags[at]
        if has_scales:
            factors[place] = scales[at]
        ends[entry] = place + U(1)


@part()
def bring_near(gradients, width, columns, first, last, num_samples, dim, near):  # type: ignore[no-untyped-def]
    """Copy gradients to near [features first..last, B, dim], in fp32."""
    place = U(0)
    for feature in range(first, last):
        at = U(columns[feature])
        for _ in range(num_samples):
            move(gradients, at, near, place, dim)
            at += width
            place += dim
