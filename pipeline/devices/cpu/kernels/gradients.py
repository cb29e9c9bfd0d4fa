"""Take a layer's gradient through its relu, transpose it and sum it over samples in one pass over memory: compiled by Numba.

torch does these one after the other, each on threads that must be woken, and transposes on one thread.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.llvm_intrinsics import (
    LANES,
    add_16,
    mask_16,
    move_1,
    move_16,
    sum_rows_1,
    transpose_16,
)
from pipeline.devices.cpu.kernels.parts import part

U = np.uint64
L = U(LANES)
ROWS = 256  # samples whose sums are one block's


@part()
def _fold_tile(gradient, values, masked, turned, sums, lines, width, count, row, column, tile, own):  # type: ignore[no-untyped-def]
    """Sixteen samples from `row` on and as many columns from `column` on; tile: room for them, and for a sum."""
    at = row * width + column
    for k in range(L):
        if len(values):
            mask_16(gradient, at + k * width, values, at + k * width, tile, k * L)
            move_16(tile, k * L, masked, at + k * width)
        else:
            move_16(gradient, at + k * width, tile, k * L)
    if len(turned):
        transpose_16(tile, U(0), L, turned, column * count + row, count)
    if len(sums):
        sum_rows_1(tile, U(0), L, lines, tile, False, U(0), L, U(0), tile)
        add_16(sums, own + column, tile, U(0), np.float32(1))


@part()
def _fold_numbers(gradient, values, masked, turned, sums, width, count, row, begin, end, tile, own):  # type: ignore[no-untyped-def]
    """The columns begin..end of one sample."""
    for column in range(begin, end):
        at = row * width + column
        move_1(gradient, at, tile, U(0))
        if len(values):
            move_1(values, at, tile, U(1))
            if tile[1] <= np.float32(0):
                tile[0] = np.float32(0)
            move_1(tile, U(0), masked, at)
        if len(turned):
            turned[column * count + row] = tile[0]
        if len(sums):
            sums[own + column] += tile[0]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def fold(gradient, values, masked, turned, sums, lines, count, width, begin, end):  # type: ignore[no-untyped-def]
    """For the blocks begin..end of ROWS samples, of matrices [count, width] that are flat; arrays of no numbers are left out.

    masked = gradient where values > 0, else 0; without values it is left out. turned [width, count]: the result transposed.
    sums [blocks, width]: of the result over each block's samples. lines: 0 to 15.
    """
    whole, tile = width // L * L, np.empty(L * L, np.float32)
    for block in range(begin, end):
        row, last, own = block * U(ROWS), min((block + U(1)) * U(ROWS), count), block * width
        if len(sums):
            sums[own : own + width] = np.float32(0)
        while row + L <= last:
            for column in range(U(0), whole, L):
                _fold_tile(gradient, values, masked, turned, sums, lines, width, count, row, column, tile, own)
            for each in range(row, row + L):
                _fold_numbers(gradient, values, masked, turned, sums, width, count, each, whole, width, tile, own)
            row += L
        for each in range(row, last):
            _fold_numbers(gradient, values, masked, turned, sums, width, count, each, U(0), width, tile, own)
