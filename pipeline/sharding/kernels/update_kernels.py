"""Update tables in position on the CPU by kernels that Numba compiles.

update_tables takes pooled gradients. Each row that a batch touched is updated once with the sum of its gradients, as
FBGEMM's exact optimizers do; a row that none touched stays as it is, its moments too, unless the table's rule is for all
rows. FBGEMM sorts the ids of every table for that; here a table of slots finds the rows, and the bags of each lie one after the other, in their order, so
the sums do not depend on threads. The next rows are prefetched, for the time goes into waiting for
memory. Threads take tables from one list, and large tables in parts, of which each has its own rows. update_rows takes the dense gradient of many small replicated tables, which lie one after the other in fp32 arrays,
as FBGEMM's dense lookup has them.

fp16 tables come as uint16. Their rows are computed in fp32 and rounded up or down at random, in proportion: rounding to the
nearest would lose every update below 1/2048 of a weight. The random number is a hash of the step, the table's offset and the row, so
it is the same on any number of threads, and in a resumed run.

Shapes: F features, B samples, L ids, T tables, D the width of a row. Weights and states of all tables lie one after
the other in 1-D arrays. Every index is unsigned: Numba then leaves out its check for negative ones, and LLVM vectorises.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.runtime.kernels.llvm_intrinsics import (
    LANES,
    adam_1,
    adam_16,
    add_1,
    add_16,
    bits,
    from_bits,
    moment_1,
    moment_16,
    narrow,
    prefetch_to_write,
    sum_rows_1,
    sum_rows_2,
    sum_rows_4,
    sum_scaled_rows_1,
    sum_scaled_rows_2,
    sum_scaled_rows_4,
    take_ticket,
    widen,
)
from pipeline.runtime.kernels.moves import move
from pipeline.runtime.kernels.parts import part

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM = range(5)
# Places in the array of a step's numbers, which pipeline.sharding.torchrec.update_rule fills: the learning rate; the moments'
# decays, what a gradient's share is of them, and their bias corrections; what remains of a weight after decoupled decay; the
# largest number and the largest norm of a row's gradient (0: no limit).
LR, EPS, DECAY, SHARE, SCALE, SQUARE_DECAY, SQUARE_SHARE, SQUARE_SCALE, KEEP, MOST, NORM = range(11)
U = np.uint64
HASH = U(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: multiplicative hashing (Knuth, TAOCP 3, 6.4)
AHEAD = 8  # rows


@part(fastmath=True)
def _subtract(into, at, gradient, scale, keep, dim):  # type: ignore[no-untyped-def]
    if keep != np.float32(1):
        for k in range(dim):
            into[at + k] *= keep
    whole = dim // U(LANES) * U(LANES)
    for k in range(U(0), whole, U(LANES)):
        add_16(into, at + k, gradient, k, -scale)
    for k in range(whole, dim):
        add_1(into, at + k, gradient, k, -scale)


@part()
def _rounded(value, key):  # type: ignore[no-untyped-def]
    """fp32 -> fp16 as uint16: to a neighbour, chosen by `key` with the probability that makes the mean `value`."""
    key ^= key >> U(33)  # the finaliser of MurmurHash3
    key *= U(0xFF51AFD7ED558CCD)
    key ^= key >> U(33)
    offset = np.float32(key >> U(40)) * np.float32(2.0**-24) - np.float32(0.5)
    exponent = max((bits(value) >> np.uint32(23)) & np.uint32(0xFF), np.uint32(113))  # 113: 2^-14, fp16's least normal
    step = from_bits(np.uint32((exponent - np.uint32(10)) << np.uint32(23)))  # between neighbours
    return narrow(min(max(value + offset * step, np.float32(-65504)), np.float32(65504)))


@part(fastmath=True)
def _subtract_half(into, at, gradient, scale, keep, dim, key):  # type: ignore[no-untyped-def]
    for k in range(dim):
        weight = widen(into[at + k])
        if keep != np.float32(1):
            weight *= keep
        into[at + k] = _rounded(weight - scale * gradient[k], key + U(k))


@part(fastmath=True)
def _mean_square(gradient, dim):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(dim):
        total += gradient[k] * gradient[k]
    return total / np.float32(dim)


@part(fastmath=True)
def _adagrad(states, at, gradient, lr, eps, dim):  # type: ignore[no-untyped-def]
    for k in range(dim):
        square = states[at + k] + gradient[k] * gradient[k]
        states[at + k] = square
        gradient[k] = lr * gradient[k] / (np.sqrt(square) + eps)


@part()
def _adam(states, squares, at, square_at, gradient, begin, numbers, dim):  # type: ignore[no-untyped-def]
    """The gradient becomes the direction of the update, but for the first moment's bias correction."""
    decay, share, scale = numbers[SQUARE_DECAY], numbers[SQUARE_SHARE], numbers[SQUARE_SCALE]
    first_decay, first_share, eps = numbers[DECAY], numbers[SHARE], numbers[EPS]
    whole = dim // U(LANES) * U(LANES)
    for k in range(U(0), whole, U(LANES)):
        adam_16(
            states,
            squares,
            at + k,
            square_at + k,
            gradient,
            begin + k,
            first_decay,
            first_share,
            decay,
            share,
            scale,
            eps,
        )
    for k in range(whole, dim):
        adam_1(
            states,
            squares,
            at + k,
            square_at + k,
            gradient,
            begin + k,
            first_decay,
            first_share,
            decay,
            share,
            scale,
            eps,
        )


@part()
def _moment(states, at, gradient, begin, numbers, dim):  # type: ignore[no-untyped-def]
    whole = dim // U(LANES) * U(LANES)
    for k in range(U(0), whole, U(LANES)):
        moment_16(states, at + k, gradient, begin + k, numbers[DECAY], numbers[SHARE])
    for k in range(whole, dim):
        moment_1(states, at + k, gradient, begin + k, numbers[DECAY], numbers[SHARE])


@part()
def _own_ids(  # type: ignore[no-untyped-def]
    indices, offsets, factors, first_bag, last_bag, is_mean, part, num_parts, ids, bags, scales
):  # fmt: skip
    """The ids of the bags whose rows are of the part, their bags, counted from the first, and factors; their number, and the largest.

    num_parts: a power of two, at most 64; a hash says of which part a row is. Arrays have room for one id more than there are.
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
def _find_rows(ids, count, largest, slots, rows, counts, entries):  # type: ignore[no-untyped-def]
    """The distinct ones of ids[:count] into `rows`, how often each occurs, and the entry of each id; the number of rows.

    Where ids are small enough a row's slot is its own: those that occur often are the first ones, and stay in the cache. Else a hash table has it.
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
def _sort_bags(bags, scales, entries, count, distinct, has_scales, ends, order, factors):  # type: ignore[no-untyped-def]
    """The bags of each row's ids one after the other in `order`, in theirs, with their factors; ends: counts, which become where each row's end."""
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
def _bring_near(gradients, width, columns, first, last, num_samples, dim, near):  # type: ignore[no-untyped-def]
    """near [features first..last, B, dim]: their gradients, in fp32. In the batch's own they are a page apart."""
    place = U(0)
    for feature in range(first, last):
        at = U(columns[feature])
        for _ in range(num_samples):
            move(gradients, at, near, place, dim)
            at += width
            place += dim


@part()
def _buffer_sizes(units, feature_begins, offsets, columns, num_samples):  # type: ignore[no-untyped-def]
    """Of the units' tables, the most ids and the most numbers of gradients."""
    longest, most = U(0), U(0)
    for unit in range(len(units)):
        table = U(units[unit, 0])
        begin, end = U(feature_begins[table]), U(feature_begins[table + U(1)])
        longest = max(longest, U(offsets[end * num_samples]) - U(offsets[begin * num_samples]))
        most = max(most, U(columns[end] - columns[begin]) * num_samples)
    return longest, most


@part()
def _largest(values, begin, end):  # type: ignore[no-untyped-def]
    largest = np.float32(0)
    for k in range(begin, end):
        value = abs(values[k])
        if not value <= largest:  # NaN too
            largest = value
    return largest


@part(fastmath=True)
def _squares(gradient, begin, end):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(begin, end):
        total += gradient[k] * gradient[k]
    return total


@part(fastmath=True)
def _clip(gradient, begin, end, most, norm):  # type: ignore[no-untyped-def]
    """Numbers to [-most, most], then the row to a norm of at most `norm`; 0: no limit."""
    if most > np.float32(0):
        for k in range(begin, end):
            gradient[k] = min(max(gradient[k], -most), most)
    if norm > np.float32(0):
        length = np.sqrt(_squares(gradient, begin, end))
        if length > norm:
            for k in range(begin, end):
                gradient[k] *= norm / length


@part(fastmath=True)
def _to_direction(gradient, states, squares, state, square, kind, numbers, dim):  # type: ignore[no-untyped-def]
    """Update the row's state; its gradient becomes the direction, which the weights go by the factor returned."""
    scale = numbers[LR]
    if kind == ROWWISE_ADAGRAD:
        states[state] += _mean_square(gradient, dim)
        scale = numbers[LR] / (np.sqrt(states[state]) + numbers[EPS])
    elif kind == ADAGRAD:
        _adagrad(states, state, gradient, numbers[LR], numbers[EPS], dim)
        scale = np.float32(1)
    elif kind == ADAM:
        _adam(states, squares, state, square, gradient, U(0), numbers, dim)
        scale = numbers[LR] * numbers[SCALE]
    elif kind == ROWWISE_ADAM:
        spread = numbers[SQUARE_DECAY] * squares[square] + numbers[SQUARE_SHARE] * _mean_square(gradient, dim)
        squares[square] = spread
        _moment(states, state, gradient, U(0), numbers, dim)
        scale = numbers[LR] * numbers[SCALE] / (np.sqrt(spread * numbers[SQUARE_SCALE]) + numbers[EPS])
    return scale


@part(fastmath=True)
def _add_penalty(gradient, weights, halves, is_half, at, l2, dim):  # type: ignore[no-untyped-def]
    if l2 == np.float32(0):
        return
    if is_half:
        for k in range(dim):
            gradient[k] += l2 * widen(halves[at + k])
    else:
        for k in range(dim):
            gradient[k] += l2 * weights[at + k]


@part()
def _prefetch(values, at, count, line):  # type: ignore[no-untyped-def]
    for k in range(U(0), count, line):
        prefetch_to_write(values, at + k)


@part()
def _gather(gradient, near, dim, order, factors, has_factors, first, last):  # type: ignore[no-untyped-def]
    """gradient [dim]: the sum over a row's bags order[first:last]."""
    k = U(0)
    while k + U(4 * LANES) <= dim:
        if has_factors:
            sum_scaled_rows_4(near, U(0), dim, order, factors, first, last, k, gradient)
        else:
            sum_rows_4(near, U(0), dim, order, factors, first, last, k, gradient)
        k += U(4 * LANES)
    if k + U(2 * LANES) <= dim:
        if has_factors:
            sum_scaled_rows_2(near, U(0), dim, order, factors, first, last, k, gradient)
        else:
            sum_rows_2(near, U(0), dim, order, factors, first, last, k, gradient)
        k += U(2 * LANES)
    if k + U(LANES) <= dim:
        if has_factors:
            sum_scaled_rows_1(near, U(0), dim, order, factors, first, last, k, gradient)
        else:
            sum_rows_1(near, U(0), dim, order, factors, first, last, k, gradient)
        k += U(LANES)
    for number in range(k, dim):
        gradient[number] = np.float32(0)
        for entry in range(first, last):
            add_1(
                gradient, number, near, U(order[entry]) * dim + number, factors[entry] if has_factors else np.float32(1)
            )


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
    """Of a table whose weights and two states begin at `begins` and are `sizes` long a row; `gradient` is overwritten.

    Thirteen parameters, for the reason that update_tables gives.
    """
    at, state, square = begins[0] + row * sizes[0], begins[1] + row * sizes[1], begins[2] + row * sizes[2]
    dim = sizes[0]
    _add_penalty(gradient, weights, halves, is_half, at, l2, dim)
    scale = _to_direction(gradient, states, squares, state, square, kind, numbers, dim)
    if is_half:
        key = (U(step) * HASH) ^ (at * U(0xD6E8FEB86659FD93))
        _subtract_half(halves, at, gradient, scale, numbers[KEEP], dim, key)
    else:
        _subtract(weights, at, gradient, scale, numbers[KEEP], dim)


@part(fastmath=True)
def _update_others(  # type: ignore[no-untyped-def]
    touched, gradient, weights, halves, is_half, states, squares, kind, numbers, l2, step, begins, sizes
):  # fmt: skip
    """The rows that are not in `touched` [rows of the table, or 0], as by a gradient of 0. Parameters: as _update_row's."""
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
    """Each of a unit's rows, by the sum over its bags. Parameters: as update_tables and _update_row have them."""
    # Without these an untouched row's formulas change nothing.
    skips, begin = kind >= ADAM or numbers[KEEP] != np.float32(1) or l2 != np.float32(0), U(0)
    for entry in range(distinct):
        if entry + U(AHEAD) < distinct:
            _prefetch_row(rows[entry + U(AHEAD)], weights, halves, is_half, states, squares, kind, begins, sizes)
        row, end = rows[entry], U(ends[entry])
        _gather(gradient, near, sizes[0], order, scales, has_scales, begin, end)
        begin = end
        if skips and _largest(gradient, U(0), sizes[0]) == np.float32(0):
            continue
        _clip(gradient, U(0), sizes[0], numbers[MOST], numbers[NORM])
        _update_row(row, gradient, weights, halves, is_half, states, squares, kind, numbers, l2, step, begins, sizes)
        if len(marks):
            _mark(marks, U(0), row)
        if len(touched):
            touched[row] = True


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def mark_ids(marks, mark_begins, feature_begins, indices, offsets, num_samples):  # type: ignore[no-untyped-def]
    """Set the bits of all rows that a batch names, in the bitmaps of update_tables: for updates that are not its own."""
    for table in range(len(feature_begins) - 1):
        first, last = U(feature_begins[table]) * num_samples, U(feature_begins[table + 1]) * num_samples
        for position in range(U(offsets[first]), U(offsets[last])):
            _mark(marks, U(mark_begins[table]), U(indices[position]))


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def update_tables(  # type: ignore[no-untyped-def]
    units, tickets, feature_begins, indices, offsets, factors, num_samples, gradients, width, columns, weights, halves, is_half,
    weight_begins, states, state_begins, squares, square_begins, kind, is_mean, numbers, l2s, every, step,
    marks, mark_begins,
):  # fmt: skip
    """Update tables in `halves` (fp16 as uint16) where `is_half`, else in `weights`: as many of the units as no other thread takes.

    Twenty-six parameters, because Numba compiles arrays and numbers: a structure would be boxed or copied at each call.

    units [n, 3]: a table, and of how many parts of its rows which one is meant; tables with `every` or `marks` have one part. tickets [1]: 0 at
    first, and the same array in all threads. feature_begins [T + 1]: a table's features are neighbours. offsets [F * B + 1] into indices [L].
    factors: a weight for each id [L], or none [0].
    gradients: fp32, or bf16 as uint16; sample b's begin at b * width, feature f's at columns [F + 1] from there.
    numbers: as LR and what follows it say. l2s [T]: a touched row's gradient gains l2 * its weights. every [T]: the table's
    rows, where untouched ones are updated too, as by a gradient of 0; else 0. marks: a bitmap of the updated rows for each
    table, which begins at byte mark_begins [T + 1]; empty where nobody asks for them.
    """
    longest, most = _buffer_sizes(units, feature_begins, offsets, columns, num_samples)
    slots = np.empty(U(4) * longest + U(16), np.int32)
    rows, entries, ends = np.empty(longest + U(1), np.uint64), np.empty(longest, np.int32), np.empty(longest, np.uint32)
    ids, bags, scales = (
        np.empty(longest + U(1), np.uint64),
        np.empty(longest + U(1), np.uint32),
        np.empty(longest + U(1), np.float32),
    )
    order, sorted_scales, near = np.empty(longest, np.uint32), np.empty(longest, np.float32), np.empty(most, np.float32)
    has_scales = is_mean or len(factors) > 0
    while True:
        unit = take_ticket(tickets)
        if unit >= len(units):
            return
        table, part, num_parts = U(units[unit, 0]), U(units[unit, 1]), U(units[unit, 2])
        first, last = U(feature_begins[table]), U(feature_begins[table + U(1)])
        dim = U(columns[first + U(1)] - columns[first])
        count, largest = _own_ids(
            indices, offsets, factors, first * num_samples, last * num_samples, is_mean, part, num_parts, ids, bags, scales
        )  # fmt: skip
        distinct = _find_rows(ids, count, largest, slots, rows, ends, entries)
        _sort_bags(bags, scales, entries, count, distinct, has_scales, ends, order, sorted_scales)
        _bring_near(gradients, width, columns, first, last, num_samples, dim, near)
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


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def update_rows(  # type: ignore[no-untyped-def]
    weights, gradient, states, squares, rows, dims, kind, numbers, l2s, every, marks
):  # fmt: skip
    """The same updates from a dense gradient; tables have `rows` [T] of `dims` [T], states a number a weight, or a row.

    A row is touched where its gradient is not all zero; every [T]: not 0 where untouched rows are updated too. marks: a byte
    for each row of all tables, which becomes 1 where the row is updated; empty where nobody asks for them.
    """
    begin, state, square, marked = U(0), U(0), U(0), U(0)
    for table in range(len(rows)):
        dim = U(dims[table])
        row_gradient = np.empty(dim, np.float32)
        state_dim = dim if kind != ROWWISE_ADAGRAD else U(1)
        square_dim = dim if kind != ROWWISE_ADAM else U(1)
        for _ in range(rows[table]):
            if every[table] or _largest(gradient, begin, begin + dim) != np.float32(0):
                for k in range(dim):
                    row_gradient[k] = gradient[begin + k]
                _clip(row_gradient, U(0), dim, numbers[MOST], numbers[NORM])
                if l2s[table] != np.float32(0):
                    for k in range(dim):
                        row_gradient[k] += l2s[table] * weights[begin + k]
                scale = _to_direction(row_gradient, states, squares, state, square, kind, numbers, dim)
                _subtract(weights, begin, row_gradient, scale, numbers[KEEP], dim)
                if len(marks):
                    marks[marked] = 1
            marked += U(1)
            begin += dim
            state += state_dim
            square += square_dim
