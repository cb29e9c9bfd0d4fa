"""Sample uniform and normal numbers by Philox on the CPU, by kernels that Numba compiles.

The numbers equal those of philox.py bit for bit, so no kernel here may fuse or reorder float
operations. Loops run over LANES numbers, because LLVM vectorizes such loops. Every index is
unsigned, as in update.py.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.llvm_intrinsics import bits, from_bits
from pipeline.devices.philox import (
    COSINE,
    GROUP,
    KEY_STEPS,
    LANES,
    LN2,
    LOG,
    MULTIPLIERS,
    ROOT_HALF,
    ROUNDS,
    SINE,
    TURN,
)

F, I32, U32, U = np.float32, np.int32, np.uint32, np.uint64
LOW = U(0xFFFFFFFF)
M0, M1 = U(MULTIPLIERS[0]), U(MULTIPLIERS[1])
K0, K1 = U(KEY_STEPS[0]), U(KEY_STEPS[1])
LN2_32, TURN_32, HALF = F(LN2), F(TURN), F(0.5)
L0, L1, L2, L3, L4, L5, L6, L7, L8 = (F(number) for number in LOG)
S0, S1, S2 = (F(number) for number in SINE)
C0, C1, C2 = (F(number) for number in COSINE)
L, G = U(LANES), U(GROUP)


@njit(nogil=True, cache=True)
def _words(group, key0, key1, words):  # type: ignore[no-untyped-def]
    """Compute the four words of a group for each lane, one word after the other."""
    first = group * L
    for lane in range(L):
        counter = first + lane
        x0, x1, x2, x3 = counter & LOW, counter >> U(32), U(0), U(0)
        a, b = key0, key1
        for _ in range(ROUNDS):
            p, q = x0 * M0, x2 * M1
            x0, x1, x2, x3 = (q >> U(32)) ^ x1 ^ a, q & LOW, (p >> U(32)) ^ x3 ^ b, p & LOW
            a, b = (a + K0) & LOW, (b + K1) & LOW
        words[lane], words[L + lane] = U32(x0), U32(x1)
        words[U(2) * L + lane], words[U(3) * L + lane] = U32(x2), U32(x3)


@njit(nogil=True, cache=True)
def _uniform(words, out, at, unit):  # type: ignore[no-untyped-def]
    for k in range(G):
        out[at + k] = (F(I32(words[k]) >> I32(8)) + HALF) * unit


@njit(nogil=True, cache=True)
def _pair(word0, word1, std):  # type: ignore[no-untyped-def]
    """Return two independent normal numbers by the Box-Muller transform."""
    u = F(I32(word0 >> U32(8))) * F(2.0**-24) + F(2.0**-25)
    shifted = U32(bits(u) - U32(ROOT_HALF))
    exponent = F(I32(shifted) >> I32(23))
    m = from_bits(U32((shifted & U32(0x007FFFFF)) + U32(ROOT_HALF))) - F(1)
    z = m * m
    high = (L8 * z + (L7 * m + L6)) * (z * z) + ((L5 * m + L4) * z + (L3 * m + L2))
    log = (high * z + (L1 * m + L0)) * (m * z) + ((exponent * LN2_32 + m) - HALF * z)
    radius = np.sqrt(F(-2) * log) * std
    angle = (F(I32(word1 << U32(2)) >> I32(8)) + HALF) * TURN_32
    square = angle * angle
    sine = ((S2 * square + S1) * square + S0) * (square * angle) + angle
    cosine = ((C2 * square + C1) * square + C0) * (square * square) + (F(1) - HALF * square)
    quadrant = word1 >> U32(30)
    radius = radius * (F(1) - F(I32(quadrant & U32(2))))
    is_odd = (quadrant & U32(1)) != U32(0)
    return radius * (-sine if is_odd else cosine), radius * (cosine if is_odd else sine)


@njit(nogil=True, cache=True)
def _normal(words, out, at, std):  # type: ignore[no-untyped-def]
    for k in range(L):  # two pairs at once, because one pair mostly waits for its previous result
        a, b = _pair(words[k], words[L + k], std)
        c, d = _pair(words[U(2) * L + k], words[U(3) * L + k], std)
        out[at + k], out[at + L + k] = a, b
        out[at + U(2) * L + k], out[at + U(3) * L + k] = c, d


@njit(nogil=True, cache=True)
def fill(out, first, key0, key1, is_normal, unit, begin, end):  # type: ignore[no-untyped-def]
    """Write the key's numbers, from number `first` on, into `out` for the groups begin..end of
    `out`.

    unit: the standard deviation of normal numbers, or the bound of uniform numbers times 2^-23.
    """
    words, group_out = np.empty(GROUP, np.uint32), np.empty(GROUP, np.float32)
    offset = first % G  # position of out[0] in its group
    for group in range(begin, end):
        _words(first // G + group, key0, key1, words)
        low, high = max(group * G, offset), min((group + U(1)) * G, offset + U(len(out)))
        is_whole = high - low == G
        target, at = (out, low - offset) if is_whole else (group_out, U(0))
        if is_normal:
            _normal(words, target, at, unit)
        else:
            _uniform(words, target, at, unit)
        if not is_whole:
            for k in range(low, high):
                out[k - offset] = group_out[k - group * G]


@njit(nogil=True, cache=True)
def sample_rows(rows, slots, first_row, first_column, width, key0, key1, is_normal, unit, values):  # type: ignore[no-untyped-def]
    """Set values[slots[i]] to the initial weights of row first_row + rows[i], from column first_column on."""
    numbers = np.empty(width, np.float32)
    for position in range(len(rows)):
        first = U(first_row + rows[position]) * U(width)
        groups = (first + U(width) + U(GROUP - 1)) // U(GROUP) - first // U(GROUP)
        fill(numbers, first, key0, key1, is_normal, unit, U(0), groups)
        values[slots[position]] = numbers[first_column : first_column + values.shape[1]]
