"""Multiply each sample's rows with each other, forward and backward, and gather numbers by position: compiled by Numba.

torch's batched product of small matrices takes several times as long as its arithmetic, computes each pair twice, and the
pairs are then gathered in another pass. Here a sample's rows and products stay in the first cache. Sums are fp32, one rounding at
the end; a sample is computed by itself, so threads change no bit. bf16 comes and goes as uint16. Positions are unsigned, for
Numba then leaves out its check for negative ones.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.layer_intrinsics import lay_16, product_8x1, product_8x2
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
NO_FLOOR = np.float32(-np.inf)


@part()
def _multiply(a, first, last, step, b, columns, width, count, c):  # type: ignore[no-untyped-def]
    """c[r, j] = the sum over k < count of a[r, k] b[k, j], for rows first..last and 16 columns at a time from `columns` on.

    a has `step` numbers a row, b and c `width`, which is a multiple of 16; last - first is a multiple of 4.
    """
    row = first
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


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def dots(rows, num_rows, dim, lead, out, begin, end):  # type: ignore[no-untyped-def]
    """out [B, lead + pairs]: the first `lead` numbers of the sample's rows [B, num_rows, dim], then i . j for all i < j."""
    padded, width = (num_rows + U(3)) // U(4) * U(4), (num_rows + L - U(1)) // L * L
    num_pairs = num_rows * (num_rows - U(1)) // U(2)
    a, b = np.zeros(width * dim + L, np.float32), np.empty((dim + L) * width, np.float32)
    c, pairs = np.zeros(padded * width + L, np.float32), np.empty(num_pairs + width + L, np.float32)
    for sample in range(begin, end):
        move(rows, sample * num_rows * dim, a, U(0), num_rows * dim)
        for row in range(U(0), width, L):
            for k in range(U(0), dim, L):
                transpose_16(a, row * dim + k, dim, b, k * width + row, width)
        for first in range(U(0), padded, U(8)):  # of what lies right of the diagonal
            _multiply(a, first, min(first + U(8), padded), dim, b, (first + U(1)) // L * L, width, dim, c)
        at = U(0)
        for row in range(num_rows - U(1)):
            count = num_rows - U(1) - row
            for k in range(U(0), count, L):  # what is too much, the next row's overwrite
                move_16(c, row * width + row + U(1) + k, pairs, at + k)
            at += count
        place = sample * (lead + num_pairs)
        move(a, U(0), out, place, lead)
        move(pairs, U(0), out, place + lead, num_pairs)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def dots_backward(gradient, rows, num_rows, dim, lead, out, begin, end):  # type: ignore[no-untyped-def]
    """out [B, num_rows, dim]: the gradient of `rows`, of gradient [B, lead + pairs]."""
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
            for k in range(U(0), count, L):  # what is too much lies left of the diagonal, and is overwritten
                move_16(g, at + k, s, row * num_rows + row + U(1) + k)
            at += count
        for row in range(num_rows):
            for k in range(row):
                s[row * num_rows + k] = s[k * num_rows + row]
            s[row * num_rows + row] = np.float32(0)
        _multiply(s, U(0), padded, num_rows, b, U(0), width, num_rows, c)
        for k in range(lead):
            c[k] += g[k]
        for row in range(num_rows):
            move(c, row * width, out, (sample * num_rows + row) * dim, dim)


@part()
def _multiply_pairs(a, first, last, step, b, columns, width, count, nothing, c):  # type: ignore[no-untyped-def]
    """As _multiply, of pairs in bf16: k counts pairs, in a as in b. last - first is a multiple of 8; nothing: 32 times 0."""
    for row in range(first, last, U(8)):
        column = columns
        while column < width:
            at, into = row * step, row * width + column
            is_pair = width - column >= U(2) * L
            if is_pair:
                product_8x2(a, at, step, b, column, width, count, nothing, U(0), U(0), NO_FLOOR, c, into, width)
            else:
                product_8x1(a, at, step, b, column, width, count, nothing, U(0), U(0), NO_FLOOR, c, into, width)
            column += U(2) * L if is_pair else L


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def dots_of_pairs(rows, num_rows, dim, lead, out, begin, end):  # type: ignore[no-untyped-def]
    """As dots, of bf16 alone, where the CPU multiplies pairs of it."""
    padded, width = (num_rows + U(7)) // U(8) * U(8), (num_rows + L - U(1)) // L * L
    step, count_of = (dim + U(2) * L - U(1)) // (U(2) * L) * U(2) * L, (dim + U(1)) // U(2)
    num_pairs = num_rows * (num_rows - U(1)) // U(2)
    a, turned = np.zeros(width * step, np.uint16), np.empty(step // U(2) * width, np.float32)
    whole, b, nothing = a.view(np.float32), turned.view(np.uint32), np.zeros(U(2) * L, np.float32)
    c, pairs = np.zeros(padded * width + L, np.float32), np.empty(num_pairs + width + L, np.float32)
    for sample in range(begin, end):
        for row in range(num_rows):
            move(rows, (sample * num_rows + row) * dim, a, row * step, dim)
        for row in range(U(0), width, L):
            for k in range(U(0), step // U(2), L):
                transpose_16(whole, row * (step // U(2)) + k, step // U(2), turned, k * width + row, width)
        for first in range(U(0), padded, U(8)):  # of what lies right of the diagonal
            columns = (first + U(1)) // L * L
            _multiply_pairs(a, first, first + U(8), step, b, columns, width, count_of, nothing, c)
        at = U(0)
        for row in range(num_rows - U(1)):
            count = num_rows - U(1) - row
            for k in range(U(0), count, L):  # what is too much, the next row's overwrite
                move_16(c, row * width + row + U(1) + k, pairs, at + k)
            at += count
        place = sample * (lead + num_pairs)
        move(a, U(0), out, place, lead)
        move(pairs, U(0), out, place + lead, num_pairs)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def dots_of_pairs_backward(gradient, rows, num_rows, dim, lead, out, begin, end):  # type: ignore[no-untyped-def]
    """As dots_backward, of bf16 alone, where the CPU multiplies pairs of it."""
    padded, width = (num_rows + U(7)) // U(8) * U(8), (dim + L - U(1)) // L * L
    num_pairs, even = num_rows * (num_rows - U(1)) // U(2), (num_rows + U(1)) // U(2) * U(2)
    step = even
    s, x = np.zeros(padded * step + L, np.uint16), np.zeros(even * width, np.uint16)
    g = np.empty(lead + num_pairs + L, np.uint16)
    b, c = np.empty(even // U(2) * width, np.uint32), np.empty(padded * width, np.float32)
    nothing = np.zeros(U(2) * L, np.float32)
    first = np.zeros(lead + L, np.float32)
    for sample in range(begin, end):
        move(gradient, sample * (lead + num_pairs), g, U(0), lead + num_pairs)
        for row in range(num_rows):
            move(rows, (sample * num_rows + row) * dim, x, row * width, dim)
        at = lead
        for row in range(num_rows - U(1)):
            count = num_rows - U(1) - row
            for k in range(U(0), count, L):  # what is too much lies left of the diagonal, and is overwritten
                move_16(g, at + k, s, row * step + row + U(1) + k)
            at += count
        for row in range(num_rows):
            for k in range(row):
                s[row * step + k] = s[k * step + row]
            s[row * step + row] = np.uint16(0)
            if even > num_rows:
                s[row * step + num_rows] = np.uint16(0)
        for row in range(U(0), even, U(2)):
            for k in range(U(0), width, L):
                lay_16(x, row * width + k, width, b, row // U(2) * width + k)
        _multiply_pairs(s, U(0), padded, step, b, U(0), width, even // U(2), nothing, c)
        move(g, U(0), first, U(0), lead)
        for k in range(lead):
            c[k] += first[k]
        for row in range(num_rows):
            move(c, row * width, out, (sample * num_rows + row) * dim, dim)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def take(source, positions, blanks, into, first, begin, end):  # type: ignore[no-untyped-def]
    """into[b, first + i] = source[b, positions[i]], and 0 at the `blanks`, for the samples b in begin..end."""
    count = U(len(positions))
    for sample in range(begin, end):
        for i in range(count):
            into[sample, first + i] = source[sample, positions[i]]
        for i in range(U(len(blanks))):
            into[sample, first + blanks[i]] = 0
