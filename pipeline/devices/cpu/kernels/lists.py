"""Copy chosen rows of lists and of matrices to their place in a batch: compiled by Numba.

Lists of random rows are far apart in memory, so most time would be spent waiting for it without prefetches. Positions
are unsigned because Numba then omits its check for negative indices, and LLVM vectorizes the loops.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.llvm_intrinsics import prefetch_to_read

U = np.uint64
AHEAD = 16  # rows
LINE_BYTES = 64


@njit(nogil=True, cache=True)
def find_lists(offsets, rows, starts, lengths):  # type: ignore[no-untyped-def]
    """Fill starts and lengths [rows] of the lists of `rows`. Return the sum of the lengths."""
    total = U(0)
    for i in range(U(len(rows))):
        row = U(rows[i])
        starts[i], lengths[i] = offsets[row], offsets[row + U(1)] - offsets[row]
        total += U(lengths[i])
    return total


@njit(nogil=True, cache=True)
def copy_lists(source, starts, lengths, into):  # type: ignore[no-untyped-def]
    """Write source[starts[i] : starts[i] + lengths[i]] to `into`, one list after the other."""
    at, num_rows, line = U(0), U(len(starts)), U(LINE_BYTES // source.itemsize)
    for i in range(num_rows):
        if i + U(AHEAD) < num_rows:
            begin = U(starts[i + U(AHEAD)])
            for k in range(begin, begin + U(lengths[i + U(AHEAD)]), line):
                prefetch_to_read(source, k)
        first, count = U(starts[i]), U(lengths[i])
        for k in range(count):
            into[at + k] = source[first + k]
        at += count


@njit(nogil=True, cache=True)
def copy_rows(source, rows, places, into):  # type: ignore[no-untyped-def]
    """Set into[places[k], i] = source[rows[i] * len(places) + k]."""
    num_rows, width, line = U(len(rows)), U(len(places)), U(LINE_BYTES // source.itemsize)
    for i in range(num_rows):
        if i + U(AHEAD) < num_rows:
            begin = U(rows[i + U(AHEAD)]) * width
            for k in range(begin, begin + width, line):
                prefetch_to_read(source, k)
        begin = U(rows[i]) * width
        for k in range(width):
            into[U(places[k]), i] = source[begin + k]
