"""Dice and its gradient over columns of rows, each by as few passes over memory as it can be: compiled by Numba.

torch's own operations go about 25 times over the rows, forward and backward together; these go over them 10 times.
Statistics are of blocks of BLOCK rows, in order, so that the number of threads changes no result.
"""

from __future__ import annotations

import numpy as np
from numba import njit

BLOCK = np.uint64(256)  # rows whose sums are taken in float32
ZERO, ONE = np.float32(0.0), np.float32(1.0)
LOG2_E = np.float32(1.4426950408889634)
LN_2_HIGH, LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2, the first of few bits
TO_INTEGER = np.float32(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to an integer, in its lowest bits
INTEGER_BITS = np.int32(0x4B400000)  # of TO_INTEGER
BIAS, MANTISSA_BITS = np.int32(127), np.int32(23)
LEAST, MOST = np.float32(-87.0), np.float32(87.0)
# The polynomial of e**x on [-ln(2) / 2, ln(2) / 2] in Cephes' expf (Moshier 1992).
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + e**-x) within 2e-7, as operations that a compiler makes vectors of."""
    negative = min(max(-x, LEAST), MOST)
    shifted = np.float32(negative * LOG2_E + TO_INTEGER)
    power = np.int32(shifted.view(np.int32) - INTEGER_BITS)
    whole = shifted - TO_INTEGER
    rest = negative - whole * LN_2_HIGH - whole * LN_2_LOW
    value = ((((P0 * rest + P1) * rest + P2) * rest + P3) * rest + P4) * rest + P5
    value = value * rest * rest + rest + ONE
    scale = np.int32(np.int32(power + BIAS) << MANTISSA_BITS).view(np.float32)
    return ONE / (ONE + value * scale)


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def statistics(rows, means, squares, begin, end):  # type: ignore[no-untyped-def]
    """means[b], squares[b]: of each column of block b of `rows`, the mean and the sum of squares about it, for blocks begin..end."""
    count, width = np.uint64(rows.shape[0]), np.uint64(rows.shape[1])
    for block in range(begin, end):
        first = block * BLOCK
        last = min(first + BLOCK, count)
        mean, square = means[block], squares[block]
        for column in range(width):
            mean[column] = ZERO
            square[column] = ZERO
        for row in range(first, last):
            for column in range(width):
                mean[column] += rows[row, column]
        share = ONE / np.float32(last - first)
        for column in range(width):
            mean[column] *= share
        for row in range(first, last):
            for column in range(width):
                distance = rows[row, column] - mean[column]
                square[column] += distance * distance


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def bend(rows, mean, scale, alpha, out, begin, end):  # type: ignore[no-untyped-def]
    """out = rows * (alpha + (1 - alpha) sigmoid((rows - mean) * scale)), for the rows begin..end."""
    width = np.uint64(rows.shape[1])
    for row in range(begin, end):
        for column in range(width):
            value = rows[row, column]
            share = _sigmoid((value - mean[column]) * scale[column])
            out[row, column] = value * (alpha[column] + (ONE - alpha[column]) * share)


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def gradient_sums(rows, gradient, mean, scale, alpha, sums, begin, end):  # type: ignore[no-untyped-def]
    """sums[b] [3, width] of block b: of the gradient at the normalized rows, of that times them, and alpha's gradient."""
    count, width = np.uint64(rows.shape[0]), np.uint64(rows.shape[1])
    for block in range(begin, end):
        first = block * BLOCK
        last = min(first + BLOCK, count)
        at_normalized, along, at_alpha = sums[block, 0], sums[block, 1], sums[block, 2]
        for column in range(width):
            at_normalized[column] = ZERO
            along[column] = ZERO
            at_alpha[column] = ZERO
        for row in range(first, last):
            for column in range(width):
                value = rows[row, column]
                normalized = (value - mean[column]) * scale[column]
                share = _sigmoid(normalized)
                rest = gradient[row, column] * value * (ONE - share)
                there = rest * share * (ONE - alpha[column])
                at_normalized[column] += there
                along[column] += there * normalized
                at_alpha[column] += rest


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def unbend(rows, gradient, mean, scale, alpha, level, slope, out, begin, end):  # type: ignore[no-untyped-def]
    """out: the gradient at the rows begin..end; level, slope: the first two sums of gradient_sums over all rows, by their number."""
    width = np.uint64(rows.shape[1])
    for row in range(begin, end):
        for column in range(width):
            value, given = rows[row, column], gradient[row, column]
            normalized = (value - mean[column]) * scale[column]
            share = _sigmoid(normalized)
            steep = ONE - alpha[column]
            there = given * value * (ONE - share) * share * steep
            within = there - level[column] - normalized * slope[column]
            out[row, column] = given * (alpha[column] + steep * share) + within * scale[column]
