"""Update tables in place on the CPU by kernels that Numba compiles.

update_tables takes pooled gradients. It updates each row of a batch once with the sum of the row's
gradients, as FBGEMM's exact optimizers do. Other rows and their moments stay unchanged, unless the
table's rule is for all rows. FBGEMM sorts the ids of every table; here a table of slots finds the
rows. Rows are prefetched, because most time is spent waiting for memory. Threads take
tables from one list. A large table is split into parts with separate rows. update_rows takes the
dense gradient of many small replicated tables, which are stored one after the other in fp32 arrays,
as in FBGEMM's dense lookup.

fp16 tables are passed as uint16 and rounded stochastically (optimizer.py). The random number is a
hash of the step, the table's offset and the row, so it is the same for any number of threads and
after a resume.

Shapes: F features, B samples, L ids, T tables, D the width of a row. Weights and states of all
tables are stored one after the other in 1-D arrays. Every index is unsigned: Numba then omits its
check for negative indices, and LLVM vectorizes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.llvm_intrinsics import prefetch_to_write
from pipeline.devices.cpu.kernels.optimizer import (
    ADAM,
    KEEP,
    MOST,
    NORM,
    ROWWISE_ADAGRAD,
    ROWWISE_ADAM,
    SGD,
    add_penalty,
    clip,
    largest_size,
    subtract,
    subtract_half,
    to_direction,
)
from pipeline.devices.cpu.kernels.parts import move, part, sum_rows

U = np.uint64
TOGETHER = U(128)  # numbers of rows that update_rows reads at a time
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
    """Write the ids of one part of the table, their bags (counted from the table's first) and their
    factors. Return the number of ids and the largest id.

    num_parts is a power of two up to 64. A hash of the row chooses the part of a row. The arrays
    need space for one more id.
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
    """Write the distinct ids of ids[:count] to `rows`, the count of each, and the entry of each id
    in `rows`. Return the number of distinct ids.

    Small ids are their own slots, and frequent rows have small ids, so these stay in the cache.
    Otherwise the slots are a hash table.
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
    """Write the bags that contain each row to `order`, row by row, and the factors of these bags.

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
    """Copy the gradients of features first..last to the buffer `near` [last - first, B, dim], in fp32."""
    place = U(0)
    for feature in range(first, last):
        at = U(columns[feature])
        for _ in range(num_samples):
            move(gradients, at, near, place, dim)
            at += width
            place += dim


@part()
def _prefetch(values, at, count, line):  # type: ignore[no-untyped-def]
    for k in range(U(0), count, line):
        prefetch_to_write(values, at + k)


@part()
def _prefetch_row(row, weights, halves, is_half, states, squares, kind, begins, sizes):  # type: ignore[no-untyped-def]
    at = begins[0] + row * sizes[0]
    _prefetch(halves, at, sizes[0] if is_half else U(0), U(32))
    _prefetch(weights, at, U(0) if is_half else sizes[0], U(16))
    if kind != SGD:
        _prefetch(states, begins[1] + row * sizes[1], sizes[1], U(16))
    if kind >= ADAM:
        _prefetch(squares, begins[2] + row * sizes[2], sizes[2], U(16))


@part(fastmath=True)
def _update_row(  # type: ignore[no-untyped-def]
    row, gradient, weights, halves, is_half, states, squares, kind, numbers, l2, step, begins, sizes
):  # fmt: skip
    """Update one row. `begins` are the positions of the table's weights and two states, and `sizes`
    their numbers per row.

    `gradient` is overwritten. Thirteen parameters: see update_tables.
    """
    at, state, square = begins[0] + row * sizes[0], begins[1] + row * sizes[1], begins[2] + row * sizes[2]
    dim = sizes[0]
    add_penalty(gradient, weights, halves, is_half, at, l2, dim)
    scale = to_direction(gradient, states, squares, state, square, kind, numbers, dim)
    if is_half:
        key = (U(step) * HASH) ^ (at * U(0xD6E8FEB86659FD93))
        subtract_half(halves, at, gradient, scale, numbers[KEEP], dim, key)
    else:
        subtract(weights, at, gradient, scale, numbers[KEEP], dim)


@part(fastmath=True)
def _update_others(  # type: ignore[no-untyped-def]
    touched, gradient, weights, halves, is_half, states, squares, kind, numbers, l2, step, begins, sizes
):  # fmt: skip
    """Update the rows that are not in `touched` [rows, or 0] with a gradient of 0. See _update_row."""
    for row in range(U(0), U(len(touched))):
        if not touched[row]:
            gradient[:] = np.float32(0)
            _update_row(
                row, gradient, weights, halves, is_half, states, squares, kind, numbers, l2, step, begins, sizes
            )


@part()
def _mark(marks, begin, row):  # type: ignore[no-untyped-def]
    """Set the bit of a row in its table's bitmap, which begins at byte `begin`."""
    marks[begin + (row >> U(3))] |= np.uint8(U(1) << (row & U(7)))


@part()
def _update_rows_of(  # type: ignore[no-untyped-def]
    near, order, scales, has_scales, rows, ends, distinct, gradient, weights, halves, is_half, states, squares, kind,
    numbers, l2, step, begins, sizes, marks, touched,
):  # fmt: skip
    """Update each row of a unit (a part of a table) with the sum over its bags. See update_tables, _update_row."""
    # With these settings the formulas do not change an untouched row.
    skips, begin = kind >= ADAM or numbers[KEEP] != np.float32(1) or l2 != np.float32(0), U(0)
    for entry in range(distinct):
        if entry + U(AHEAD) < distinct:
            _prefetch_row(rows[entry + U(AHEAD)], weights, halves, is_half, states, squares, kind, begins, sizes)
        row, end = rows[entry], U(ends[entry])
        sum_rows(near, U(0), sizes[0], order, scales, has_scales, begin, end, gradient)
        begin = end
        if skips and largest_size(gradient, U(0), sizes[0]) == np.float32(0):
            continue
        clip(gradient, U(0), sizes[0], numbers[MOST], numbers[NORM])
        _update_row(row, gradient, weights, halves, is_half, states, squares, kind, numbers, l2, step, begins, sizes)
        if len(marks):
            _mark(marks, U(0), row)
        if len(touched):
            touched[row] = True


@njit(nogil=True, cache=True)
def mark_ids(marks, mark_begins, feature_begins, indices, offsets, num_samples):  # type: ignore[no-untyped-def]
    """Set the bits of all rows of a batch in the bitmaps of update_tables, if another function updates the rows."""
    for table in range(len(feature_begins) - 1):
        first, last = U(feature_begins[table]) * num_samples, U(feature_begins[table + 1]) * num_samples
        for position in range(U(offsets[first]), U(offsets[last])):
            _mark(marks, U(mark_begins[table]), U(indices[position]))


@njit(nogil=True, fastmath=True, cache=True)
def update_tables(  # type: ignore[no-untyped-def]
    units, feature_begins, indices, offsets, factors, num_samples, gradients, width, columns, weights, halves, is_half,
    weight_begins, states, state_begins, squares, square_begins, kind, is_mean, numbers, l2s, every, step,
    marks, mark_begins, begin, end,
):  # fmt: skip
    """Update the units begin..end. The rows are in `halves` (fp16 as uint16) if `is_half`,
    otherwise in `weights`.

    Twenty-seven parameters, because a structure would be boxed or copied at each call.

    units [n, 3]: a table, a part of its rows, and the number of parts (1 with `every` or `marks`).
    feature_begins [T + 1]. offsets [F * B + 1] into indices [L]. factors: weights [L], or [0].
    gradients: fp32, or bf16 as uint16; sample b begins at b * width, feature f at columns [F + 1]
    from there. numbers: see LR. l2s [T]: l2 * weights is added to the gradient of a touched row.
    every [T]: the table's rows if untouched rows are updated with a gradient of 0; otherwise 0.
    marks: bitmaps of updated rows, which begin at byte mark_begins [T + 1], or empty.
    """
    longest, most = buffer_sizes(units[begin:end], feature_begins, offsets, columns, num_samples)
    slots = np.empty(U(4) * longest + U(16), np.int32)
    rows, entries, ends = np.empty(longest + U(1), np.uint64), np.empty(longest, np.int32), np.empty(longest, np.uint32)
    ids, bags, scales = (
        np.empty(longest + U(1), np.uint64),
        np.empty(longest + U(1), np.uint32),
        np.empty(longest + U(1), np.float32),
    )
    order, sorted_scales, near = np.empty(longest, np.uint32), np.empty(longest, np.float32), np.empty(most, np.float32)
    has_scales = is_mean or len(factors) > 0
    for unit in range(begin, end):
        table, part, num_parts = U(units[unit, 0]), U(units[unit, 1]), U(units[unit, 2])
        first, last = U(feature_begins[table]), U(feature_begins[table + U(1)])
        dim = U(columns[first + U(1)] - columns[first])
        count, largest = own_ids(
            indices, offsets, factors, first * num_samples, last * num_samples, is_mean, part, num_parts, ids, bags, scales
        )  # fmt: skip
        distinct = find_rows(ids, count, largest, slots, rows, ends, entries)
        sort_bags(bags, scales, entries, count, distinct, has_scales, ends, order, sorted_scales)
        bring_near(gradients, width, columns, first, last, num_samples, dim, near)
        begins = (U(weight_begins[first]), U(state_begins[first]), U(square_begins[first]))
        sizes = (dim, dim if kind != ROWWISE_ADAGRAD else U(1), dim if kind != ROWWISE_ADAM else U(1))
        gradient, touched = np.empty(dim, np.float32), np.zeros(every[table], np.bool_)
        bits_of_rows = marks[mark_begins[table] : mark_begins[table + U(1)]] if len(marks) else marks
        _update_rows_of(
            near, order, sorted_scales, has_scales, rows, ends, distinct, gradient, weights, halves, is_half, states, squares, kind,
            numbers, l2s[table], step, begins, sizes, bits_of_rows, touched,
        )  # fmt: skip
        if every[table]:
            bits_of_rows[:] = 255
        _update_others(
            touched, gradient, weights, halves, is_half, states, squares, kind, numbers, l2s[table], step, begins, sizes
        )


@part()
def _has_bits(bits, begin, end):  # type: ignore[no-untyped-def]
    """Return whether any of the numbers begin..end is not zero. `bits` holds the numbers as integers,
    because comparisons by fastmath may take NaN for 0.
    """
    found = np.uint32(0)
    for k in range(begin, end):
        found |= np.uint32(bits[k] << np.uint32(1))  # without the sign: -0 is 0
    return found != np.uint32(0)


@njit(nogil=True, fastmath=True, cache=True)
def update_rows(  # type: ignore[no-untyped-def]
    weights, gradient, states, squares, rows, dims, kind, numbers, l2s, every, marks
):  # fmt: skip
    """Update tables of `rows` [T] x `dims` [T] like update_tables, from a dense gradient.

    A state has one number per weight or one per row. A row is touched if its gradient is not all
    zero. every [T]: not 0 if untouched rows of the table are updated too. marks: one byte per row,
    set to 1 if the row is updated; or empty.
    """
    begin, state, square, marked = U(0), U(0), U(0), U(0)
    bits = gradient.view(np.uint32)
    for table in range(len(rows)):
        dim = U(dims[table])
        row_gradient = np.empty(dim, np.float32)
        state_dim = dim if kind != ROWWISE_ADAGRAD else U(1)
        square_dim = dim if kind != ROWWISE_ADAM else U(1)
        remaining, together = U(rows[table]), max(TOGETHER // dim, U(1))
        while remaining:
            count = min(together, remaining)
            remaining -= count
            if not every[table] and not _has_bits(bits, begin, begin + count * dim):
                marked += count
                begin += count * dim
                state += count * state_dim
                square += count * square_dim
                continue
            for _ in range(count):
                if every[table] or _has_bits(bits, begin, begin + dim):
                    for k in range(dim):
                        row_gradient[k] = gradient[begin + k]
                    clip(row_gradient, U(0), dim, numbers[MOST], numbers[NORM])
                    if l2s[table] != np.float32(0):
                        for k in range(dim):
                            row_gradient[k] += l2s[table] * weights[begin + k]
                    scale = to_direction(row_gradient, states, squares, state, square, kind, numbers, dim)
                    subtract(weights, begin, row_gradient, scale, numbers[KEEP], dim)
                    if len(marks):
                        marks[marked] = 1
                marked += U(1)
                begin += dim
                state += state_dim
                square += square_dim
