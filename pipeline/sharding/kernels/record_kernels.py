"""Read and write records of a file between its blocks and the slots of a table, by kernels that Numba compiles.

A record is a row's weights and its optimizer's states, float32. Records lie in units of whole blocks, as many as fit, and none
lies in two units; where they are whole sectors of the device, one is written without its block being read first. Each thread has a buffer of its own, aligned as O_DIRECT asks; a run of neighbouring units is one read or write.
Kernels return the errno of the first call that failed, SHORT for a file that ended, and 0.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

U, int64 = np.uint64, np.int64
SHORT = -1
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uint64, types.int64))
_pwrite = types.ExternalFunction("pwrite", types.int64(types.int32, types.uintp, types.uint64, types.int64))
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())
EINTR = 4


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _read(fd, buffer, num_bytes, offset):  # type: ignore[no-untyped-def]
    done = 0
    while done < num_bytes:
        count = _pread(np.int32(fd), U(buffer.ctypes.data + done), U(num_bytes - done), int64(offset + done))
        if count < 0 and _errno()[0] == EINTR:
            continue
        if count < 0:
            return int64(_errno()[0])
        if count == 0:  # beyond the end of the file: nothing was ever written there
            buffer[done // 4 : num_bytes // 4] = 0
            return int64(0)
        done += count
    return int64(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _write(fd, buffer, num_bytes, offset):  # type: ignore[no-untyped-def]
    done = 0
    while done < num_bytes:
        count = _pwrite(np.int32(fd), U(buffer.ctypes.data + done), U(num_bytes - done), int64(offset + done))
        if count < 0 and _errno()[0] == EINTR:
            continue
        if count < 0:
            return int64(_errno()[0])
        if count == 0:
            return int64(SHORT)
        done += count
    return int64(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _end_of_run(rows, first, end, rows_a_unit, most_units):  # type: ignore[no-untyped-def]
    """The position after the last row of the run of neighbouring units that rows[first] begins."""
    begin = rows[first] // rows_a_unit
    last = begin
    position = first + 1
    while position < end:
        unit = rows[position] // rows_a_unit
        if unit > last + 1 or unit - begin >= most_units:
            break
        last = unit
        position += 1
    return position


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def load(fd, rows, slots, begin, end, layout, buffer, weights, states, squares, counts):  # type: ignore[no-untyped-def]
    """Fill the slots of rows[begin:end], ascending, from their records. counts: reads and bytes are added.

    layout: rows a unit; and numbers a unit, a record, from one record to the next, and a sector. weights, states, squares:
    [slots, numbers a row].
    """
    rows_a_unit, unit, record, stride, _ = layout
    most_units = len(buffer) // unit
    dim, second = weights.shape[1], weights.shape[1] + states.shape[1]
    first = begin
    while first < end:
        after = _end_of_run(rows, first, end, rows_a_unit, most_units)
        first_unit = rows[first] // rows_a_unit
        num_bytes = (rows[after - 1] // rows_a_unit + 1 - first_unit) * unit * 4
        error = _read(fd, buffer, num_bytes, first_unit * unit * 4)
        if error != 0:
            return error
        counts[0] += 1
        counts[1] += num_bytes
        for position in range(first, after):
            row, slot = rows[position], slots[position]
            at = (row // rows_a_unit - first_unit) * unit + row % rows_a_unit * stride
            weights[slot] = buffer[at : at + dim]
            states[slot] = buffer[at + dim : at + second]
            squares[slot] = buffer[at + second : at + record]
        first = after
    return int64(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def gather(slots, weights, states, squares, records):  # type: ignore[no-untyped-def]
    """records [n, numbers a record]: of the slots [n]."""
    dim, second = weights.shape[1], weights.shape[1] + states.shape[1]
    for position in range(len(slots)):
        slot = slots[position]
        records[position, :dim] = weights[slot]
        records[position, dim:second] = states[slot]
        records[position, second:] = squares[slot]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def is_set(bits, row):  # type: ignore[no-untyped-def]
    return (bits[row >> 3] >> np.uint8(row & 7)) & np.uint8(1) != 0


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def set_bits(bits, rows):  # type: ignore[no-untyped-def]
    for row in rows:
        bits[row >> 3] |= np.uint8(1) << np.uint8(row & 7)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def are_set(bits, rows, result):  # type: ignore[no-untyped-def]
    for position in range(len(rows)):
        result[position] = is_set(bits, rows[position])


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _keeps_others(rows, first, after, rows_a_unit, written, num_rows):  # type: ignore[no-untyped-def]
    """Whether the units of rows[first:after] hold records that are none of these."""
    position = first
    first_unit, last_unit = rows[first] // rows_a_unit, rows[after - 1] // rows_a_unit
    for row in range(first_unit * rows_a_unit, min((last_unit + 1) * rows_a_unit, num_rows)):
        if position < after and rows[position] == row:
            position += 1
        elif is_set(written, row):
            return True
    return False


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _store_records(fd, rows, records, begin, end, layout, buffer, counts):  # type: ignore[no-untyped-def]
    """Write records[begin:end] and no byte of others; neighbours in a unit at once."""
    rows_a_unit, unit, record, stride, _ = layout
    first = begin
    while first < end:
        row = rows[first]
        after = first + 1
        while after < end and rows[after] == rows[after - 1] + 1 and rows[after] // rows_a_unit == row // rows_a_unit:
            after += 1
        for position in range(first, after):
            at = (position - first) * stride
            buffer[at : at + record] = records[position]
            buffer[at + record : at + stride] = 0
        num_bytes = (after - first) * stride * 4
        error = _write(fd, buffer, num_bytes, (row // rows_a_unit * unit + row % rows_a_unit * stride) * 4)
        if error != 0:
            return error
        counts[2] += 1
        counts[3] += num_bytes
        counts[4] += after - first
        first = after
    return int64(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def store(fd, rows, records, begin, end, layout, buffer, written, num_rows, counts):  # type: ignore[no-untyped-def]
    """Write records[begin:end] of rows[begin:end], ascending. Their units are this call's alone.

    counts: reads, bytes read, writes, bytes and rows written are added; a unit that keeps other records is read first, unless
    its records are whole sectors.
    """
    rows_a_unit, unit, record, stride, sector = layout
    most_units = len(buffer) // unit
    first = begin
    while first < end:
        after = _end_of_run(rows, first, end, rows_a_unit, most_units)
        first_unit = rows[first] // rows_a_unit
        num_bytes = (rows[after - 1] // rows_a_unit + 1 - first_unit) * unit * 4
        keeps_others = _keeps_others(rows, first, after, rows_a_unit, written, num_rows)
        if keeps_others and stride % sector == 0:
            error = _store_records(fd, rows, records, first, after, layout, buffer, counts)
            if error != 0:
                return error
            first = after
            continue
        if keeps_others:
            error = _read(fd, buffer, num_bytes, first_unit * unit * 4)
            if error != 0:
                return error
            counts[0] += 1
            counts[1] += num_bytes
        else:
            buffer[: num_bytes // 4] = 0
        for position in range(first, after):
            at = (rows[position] // rows_a_unit - first_unit) * unit + rows[position] % rows_a_unit * stride
            buffer[at : at + record] = records[position]
        error = _write(fd, buffer, num_bytes, first_unit * unit * 4)
        if error != 0:
            return error
        counts[2] += 1
        counts[3] += num_bytes
        counts[4] += after - first
        first = after
    return int64(0)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def read_range(fd, first_row, num_rows, layout, begin, end, written, buffer, values):  # type: ignore[no-untyped-def]
    """values [num_rows, end - begin]: numbers begin..end of the records of the written rows among first_row and on."""
    rows_a_unit, unit, _, stride, _ = layout
    most_units = len(buffer) // unit
    row, last = first_row, first_row + num_rows
    while row < last:
        first_unit = row // rows_a_unit
        after = min((first_unit + most_units) * rows_a_unit, last)
        is_any = False
        for each in range(row, after):
            if is_set(written, each):
                is_any = True
                break
        if is_any:
            num_bytes = ((after - 1) // rows_a_unit + 1 - first_unit) * unit * 4
            error = _read(fd, buffer, num_bytes, first_unit * unit * 4)
            if error != 0:
                return error
            for each in range(row, after):
                if is_set(written, each):
                    at = (each // rows_a_unit - first_unit) * unit + each % rows_a_unit * stride
                    values[each - first_row] = buffer[at + begin : at + end]
        row = after
    return int64(0)
