"""Update tables in position on the CPU by kernels that Numba compiles.

update_tables takes pooled gradients. Each row that a batch touched is updated once with the sum of its gradients, as
FBGEMM's exact optimizers do; a row that none touched stays as it is, its moments too, unless the table's rule is for all
rows. FBGEMM sorts the ids of every table for that; here a table of slots finds the rows (row_kernels). The next rows are
prefetched, for the time goes into waiting for memory. Threads take tables from one list, and large tables in parts, of
which each has its own rows. update_rows takes the dense gradient of many small replicated tables, which lie one after the
other in fp32 arrays, as FBGEMM's dense lookup has them.

fp16 tables come as uint16, and are rounded at random (optimizer_kernels). The random number is a hash of the step, the
table's offset and the row, so it is the same on any number of threads, and in a resumed run.

Shapes: F features, B samples, L ids, T tables, D the width of a row. Weights and states of all tables lie one after
the other in 1-D arrays. Every index is unsigned: Numba then leaves out its check for negative ones, and LLVM vectorises.
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
from pipeline.devices.cpu.kernels.parts import part, sum_rows
from pipeline.devices.cpu.kernels.row import (
    AHEAD,
    HASH,
    bring_near,
    buffer_sizes,
    find_rows,
    own_ids,
    sort_bags,
)

U = np.uint64
TOGETHER = U(128)  # numbers of rows that update_rows looks at at once


@part()
def _prefetch(values, at, count, line):  # type: ignore[no-untyped-def]
    for k in range(U(0), count, line):
        prefetch_to_write(values, at + k)


@part()
def _prefetch_row(row, tables, kind, begins, sizes):  # type: ignore[no-untyped-def]
    at = begins[0] + row * sizes[0]
    _prefetch(tables.halves, at, sizes[0] if tables.is_half else U(0), U(32))
    _prefetch(tables.weights, at, U(0) if tables.is_half else sizes[0], U(16))
    if kind != SGD:
        _prefetch(tables.states, begins[1] + row * sizes[1], sizes[1], U(16))
    if kind >= ADAM:
        _prefetch(tables.squares, begins[2] + row * sizes[2], sizes[2], U(16))


@part(fastmath=True)
def _update_row(row, gradient, tables, update, l2, begins, sizes):  # type: ignore[no-untyped-def]
    """Update a row of a table whose weights and two states begin at `begins` and are `sizes` long a row.

    `gradient` is overwritten.
    """
    at, state, square = begins[0] + row * sizes[0], begins[1] + row * sizes[1], begins[2] + row * sizes[2]
    dim, numbers = sizes[0], update.numbers
    add_penalty(gradient, tables.weights, tables.halves, tables.is_half, at, l2, dim)
    scale = to_direction(gradient, tables.states, tables.squares, state, square, update.kind, numbers, dim)
    if tables.is_half:
        key = (U(update.step) * HASH) ^ (at * U(0xD6E8FEB86659FD93))
        subtract_half(tables.halves, at, gradient, scale, numbers[KEEP], dim, key)
    else:
        subtract(tables.weights, at, gradient, scale, numbers[KEEP], dim)


@part(fastmath=True)
def _update_others(touched, gradient, tables, update, l2, begins, sizes):  # type: ignore[no-untyped-def]
    """Update the rows not in `touched` [rows of the table, or 0], as by a gradient of 0."""
    for row in range(U(0), U(len(touched))):
        if not touched[row]:
            gradient[:] = np.float32(0)
            _update_row(row, gradient, tables, update, l2, begins, sizes)


@part()
def _mark(marks, begin, row):  # type: ignore[no-untyped-def]
    """Set the bit of a row in its table's bitmap, which begins at byte `begin`."""
    marks[begin + (row >> U(3))] |= np.uint8(U(1) << (row & U(7)))


@part()
def _update_rows_of(given, found, gradient, tables, update, l2, place, seen):  # type: ignore[no-untyped-def]
    """Update each of a unit's rows by the sum over its bags.

    given: gradients of the table's features, bags in the order of rows, their factors, and whether there are factors.
    found: rows, the end of each row's bags, and how many rows. place: begins and sizes, as _update_row has them.
    seen: the table's bitmap of updated rows, and which rows were touched; empty if nobody asks for them.
    """
    near, order, scales, has_scales = given
    rows, ends, distinct = found
    begins, sizes = place
    marks, touched = seen
    kind, numbers = update.kind, update.numbers
    # Without these an untouched row's formulas change nothing.
    skips, begin = kind >= ADAM or numbers[KEEP] != np.float32(1) or l2 != np.float32(0), U(0)
    for entry in range(distinct):
        if entry + U(AHEAD) < distinct:
            _prefetch_row(rows[entry + U(AHEAD)], tables, kind, begins, sizes)
        row, end = rows[entry], U(ends[entry])
        sum_rows(near, U(0), sizes[0], order, (scales, has_scales), (begin, end), gradient)
        begin = end
        if skips and largest_size(gradient, U(0), sizes[0]) == np.float32(0):
            continue
        clip(gradient, U(0), sizes[0], numbers[MOST], numbers[NORM])
        _update_row(row, gradient, tables, update, l2, begins, sizes)
        if len(marks):
            _mark(marks, U(0), row)
        if len(touched):
            touched[row] = True


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def mark_ids(tables, indices, offsets, num_samples):  # type: ignore[no-untyped-def]
    """Set the bits of all rows that a batch names in the bitmaps of Tables, for updates that are not update_tables' own."""
    for table in range(len(tables.feature_begins) - 1):
        first = U(tables.feature_begins[table]) * num_samples
        last = U(tables.feature_begins[table + 1]) * num_samples
        for position in range(U(offsets[first]), U(offsets[last])):
            _mark(tables.marks, U(tables.mark_begins[table]), U(indices[position]))


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def update_tables(units, tables, batch, gradients, states, update, begin, end):  # type: ignore[no-untyped-def]
    """Update the rows of the units begin..end by the gradients of pooled rows. Parameters: devices.cpu.table_records.

    units [n, 3]: a table, a part of its rows, and the number of parts; tables with `every` or `marks` have one part.
    """
    num_samples, marks = batch.num_samples, tables.marks
    longest, most = buffer_sizes(units[begin:end], tables.feature_begins, batch, gradients.columns)
    slots = np.empty(U(4) * longest + U(16), np.int32)
    rows, entries, ends = np.empty(longest + U(1), np.uint64), np.empty(longest, np.int32), np.empty(longest, np.uint32)
    ids, bags, scales = (
        np.empty(longest + U(1), np.uint64),
        np.empty(longest + U(1), np.uint32),
        np.empty(longest + U(1), np.float32),
    )
    order, sorted_scales, near = np.empty(longest, np.uint32), np.empty(longest, np.float32), np.empty(most, np.float32)
    has_scales = update.is_mean or len(batch.factors) > 0
    for unit in range(begin, end):
        table = U(units[unit, 0])
        first, last = U(tables.feature_begins[table]), U(tables.feature_begins[table + U(1)])
        dim = U(gradients.columns[first + U(1)] - gradients.columns[first])
        span, own_part = (first * num_samples, last * num_samples), (U(units[unit, 1]), U(units[unit, 2]))
        count, largest = own_ids(batch, span, update.is_mean, own_part, ids, bags, scales)
        distinct = find_rows(ids, count, largest, slots, rows, ends, entries)
        sort_bags((bags, scales), entries, count, distinct, has_scales, ends, (order, sorted_scales))
        bring_near(gradients, first, last, num_samples, dim, near)
        begins = (U(states.weight_begins[first]), U(states.state_begins[first]), U(states.square_begins[first]))
        sizes = (dim, dim if update.kind != ROWWISE_ADAGRAD else U(1), dim if update.kind != ROWWISE_ADAM else U(1))
        gradient, touched = np.empty(dim, np.float32), np.zeros(update.every[table], np.bool_)
        bits_of_rows = marks[tables.mark_begins[table] : tables.mark_begins[table + U(1)]] if len(marks) else marks
        given, found = (near, order, sorted_scales, has_scales), (rows, ends, distinct)
        l2 = update.l2s[table]
        _update_rows_of(given, found, gradient, states, update, l2, (begins, sizes), (bits_of_rows, touched))
        if update.every[table]:
            bits_of_rows[:] = 255
        _update_others(touched, gradient, states, update, l2, begins, sizes)


@part()
def _has_bits(bits, begin, end):  # type: ignore[no-untyped-def]
    """Whether any of the numbers begin..end is other than zero, whose bits are `bits`."""
    found = np.uint32(0)
    for k in range(begin, end):
        found |= bits[k]
    return found != np.uint32(0)


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def update_rows(gradient, tables, update, marks):  # type: ignore[no-untyped-def]
    """The same updates of FlatTables by a dense gradient.

    A row is touched if its gradient is not all zero. marks: a byte for each row of all tables, which becomes 1 if the
    row is updated; empty if nobody asks for them.
    """
    begin, state, square, marked = U(0), U(0), U(0), U(0)
    bits, numbers, every, l2s = gradient.view(np.uint32), update.numbers, update.every, update.l2s
    for table in range(len(tables.rows)):
        dim = U(tables.dims[table])
        row_gradient = np.empty(dim, np.float32)
        state_dim = dim if update.kind != ROWWISE_ADAGRAD else U(1)
        square_dim = dim if update.kind != ROWWISE_ADAM else U(1)
        remaining, together = U(tables.rows[table]), max(TOGETHER // dim, U(1))
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
                if every[table] or largest_size(gradient, begin, begin + dim) != np.float32(0):
                    for k in range(dim):
                        row_gradient[k] = gradient[begin + k]
                    clip(row_gradient, U(0), dim, numbers[MOST], numbers[NORM])
                    if l2s[table] != np.float32(0):
                        for k in range(dim):
                            row_gradient[k] += l2s[table] * tables.weights[begin + k]
                    scale = to_direction(
                        row_gradient, tables.states, tables.squares, state, square, update.kind, numbers, dim
                    )
                    subtract(tables.weights, begin, row_gradient, scale, numbers[KEEP], dim)
                    if len(marks):
                        marks[marked] = 1
                marked += U(1)
                begin += dim
                state += state_dim
                square += square_dim
