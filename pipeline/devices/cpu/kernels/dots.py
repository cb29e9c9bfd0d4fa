"""Multiply each sample's rows with each other, forward and backward: compiled by Numba.

A sample's rows and products stay in the first-level cache. Sums are fp32 and are rounded once at
the end. Each sample is computed independently, so threads change no bit. bf16 is passed as uint16.
Positions are unsigned because Numba then omits its check for negative indices.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.llvm_intrinsics import (
    LANES,
    move_16,
    multiply_4x1,
    multiply_4x2,
    multiply_8x1,
    multiply_8x2,
    transpose_16,
)
from pipeline.devices.cpu.kernels.parts import move, part

U = np.uint64
L = U(LANES)


@part()
def _multiply(a, rows, step, b, columns, width, count, c):  # type: ignore[no-untyped-def]
    """Set c[r, j] = the sum over k < count of a[r, k] b[k, j], 16 columns at a time, beginning at
    `columns`.

    rows: (first, last); their difference is a multiple of 4. a has `step` numbers per row. b and c
    have `width` numbers per row, a multiple of 16.
    """
    row, last = rows
    while row < last:
        takes_8 = last - row >= U(8)
        column = columns
        while column < width:
            at, into = row * step, row * width + column
            is_pair = width - column >= U(2) * L
            if takes_8 and is_pair:
                multiply_8x2(a, at, step, b, column, width, count, c, into, width)
            elif takes_8:
                multiply_8x1(a, at, step, b, column, width, count, c, into, width)
            elif is_pair:
                multiply_4x2(a, at, step, b, column, width, count, c, into, width)
            else:
                multiply_4x1(a, at, step, b, column, width, count, c, into, width)
            column += U(2) * L if is_pair else L
        row += U(8) if takes_8 else U(4)


@njit(nogil=True, cache=True)
def dots(rows, num_rows, dim, lead, out, begin, end):  # type: ignore[no-untyped-def]
    """Fill out [B, lead + pairs] from rows [B, num_rows, dim]: first `lead` numbers, then the products of all pairs."""
    padded, width = (num_rows + U(3)) // U(4) * U(4), (num_rows + L - U(1)) // L * L
    num_pairs = num_rows * (num_rows - U(1)) // U(2)
    a, b = np.zeros(width * dim + L, np.float32), np.empty((dim + L) * width, np.float32)
    c, pairs = np.zeros(padded * width + L, np.float32), np.empty(num_pairs + width + L, np.float32)
    for sample in range(begin, end):
        move(rows, sample * num_rows * dim, a, U(0), num_rows * dim)
        for row in range(U(0), width, L):
            for k in range(U(0), dim, L):
                transpose_16(a, row * dim + k, dim, b, k * width + row, width)
        for first in range(U(0), padded, U(8)):  # products right of the diagonal
            _multiply(a, (first, min(first + U(8), padded)), dim, b, (first + U(1)) // L * L, width, dim, c)
        at = U(0)
        for row in range(num_rows - U(1)):
            count = num_rows - U(1) - row
            for k in range(U(0), count, L):  # the next row overwrites the surplus
                move_16(c, row * width + row + U(1) + k, pairs, at + k)
            at += count
        place = sample * (lead + num_pairs)
        move(a, U(0), out, place, lead)
        move(pairs, U(0), out, place + lead, num_pairs)


@njit(nogil=True, cache=True)
def dots_backward(gradient, rows, num_rows, dim, lead, out, begin, end):  # type: ignore[no-untyped-def]
    """Fill out [B, num_rows, dim] with the gradient of `rows`, from gradient [B, lead + pairs]."""
    padded, width = (num_rows + U(3)) // U(4) * U(4), (dim + L - U(1)) // L * L
    num_pairs = num_rows * (num_rows - U(1)) // U(2)
    g = np.empty(lead + num_pairs + U(2) * L, np.float32)
    s, b = np.zeros(padded * num_rows + U(2) * L, np.float32), np.zeros(num_rows * width, np.float32)
    c = np.empty(padded * width, np.float32)
    for sample in range(begin, end):
        move(gradient, sample * (lead + num_pairs), g, U(0), lead + num_pairs)
        for row in range(num_rows):
            move(rows, (sample * num_rows + row) * dim, b, row * width, dim)
        at = lead
        for row in range(num_rows - U(1)):
            count = num_rows - U(1) - row
            # the surplus is left of the diagonal and is overwritten
            for k in range(U(0), count, L):
                move_16(g, at + k, s, row * num_rows + row + U(1) + k)
            at += count
        for row in range(num_rows):
            for k in range(row):
                s[row * num_rows + k] = s[k * num_rows + row]
            s[row * num_rows + row] = np.float32(0)
        _multiply(s, (U(0), padded), num_rows, b, U(0), width, num_rows, c)
        for k in range(lead):
            c[k] += g[k]
        for row in range(num_rows):
            move(c, row * width, out, (sample * num_rows + row) * dim, dim)
