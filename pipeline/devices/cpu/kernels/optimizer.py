"""Compute the optimizer's step for one row: update the row's states, and return the change of the
weights.

fp16 rows are passed as uint16. Updates are computed in fp32 and rounded stochastically, because
rounding to the nearest would lose every update below 1/2048 of a weight.
"""

from __future__ import annotations

import numpy as np

from pipeline.devices.cpu.kernels.llvm_intrinsics import (
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
    widen,
)
from pipeline.devices.cpu.kernels.parts import part

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM = range(5)
# Places in the array of a step's numbers, which pipeline.sharding.torchrec.update_rule fills: the
# learning rate; the decays of the moments, the gradient's share in them, and their bias
# corrections; what remains of a weight after decoupled decay; the largest number and the largest
# norm of a row's gradient (0: no limit).
LR, EPS, DECAY, SHARE, SCALE, SQUARE_DECAY, SQUARE_SHARE, SQUARE_SCALE, KEEP, MOST, NORM = range(11)
U = np.uint64


@part(fastmath=True)
def subtract(into, at, gradient, scale, keep, dim):  # type: ignore[no-untyped-def]
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
    """Round fp32 to one of the two nearest fp16 (as uint16). `key` chooses, so that the mean over keys is `value`."""
    key ^= key >> U(33)  # the finalizer of MurmurHash3
    key *= U(0xFF51AFD7ED558CCD)
    key ^= key >> U(33)
    offset = np.float32(key >> U(40)) * np.float32(2.0**-24) - np.float32(0.5)
    # 113: 2^-14, the smallest normal number of fp16
    exponent = max((bits(value) >> np.uint32(23)) & np.uint32(0xFF), np.uint32(113))
    # distance between two neighbours
    step = from_bits(np.uint32((exponent - np.uint32(10)) << np.uint32(23)))
    return narrow(min(max(value + offset * step, np.float32(-65504)), np.float32(65504)))


@part(fastmath=True)
def subtract_half(into, at, gradient, scale, keep, dim, key):  # type: ignore[no-untyped-def]
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
    """Replace the gradient with Adam's direction, but without the bias correction of the first moment."""
    decay, share, scale = numbers[SQUARE_DECAY], numbers[SQUARE_SHARE], numbers[SQUARE_SCALE]
    first_decay, first_share, eps = numbers[DECAY], numbers[SHARE], numbers[EPS]
    whole = dim // U(LANES) * U(LANES)
    for k in range(U(0), whole, U(LANES)):
        adam_16(
            states, squares, at + k, square_at + k, gradient, begin + k,
            first_decay, first_share, decay, share, scale, eps,
        )  # fmt: skip
    for k in range(whole, dim):
        adam_1(
            states, squares, at + k, square_at + k, gradient, begin + k,
            first_decay, first_share, decay, share, scale, eps,
        )  # fmt: skip


@part()
def _moment(states, at, gradient, begin, numbers, dim):  # type: ignore[no-untyped-def]
    whole = dim // U(LANES) * U(LANES)
    for k in range(U(0), whole, U(LANES)):
        moment_16(states, at + k, gradient, begin + k, numbers[DECAY], numbers[SHARE])
    for k in range(whole, dim):
        moment_1(states, at + k, gradient, begin + k, numbers[DECAY], numbers[SHARE])


@part()
def largest_size(values, begin, end):  # type: ignore[no-untyped-def]
    largest = np.float32(0)
    for k in range(begin, end):
        value = abs(values[k])
        if not value <= largest:  # true for NaN too
            largest = value
    return largest


@part(fastmath=True)
def _squares(gradient, begin, end):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(begin, end):
        total += gradient[k] * gradient[k]
    return total


@part(fastmath=True)
def clip(gradient, begin, end, most, norm):  # type: ignore[no-untyped-def]
    """Clip the numbers to [-most, most], then scale the row so that its norm is at most `norm`. 0 means no limit."""
    if most > np.float32(0):
        for k in range(begin, end):
            gradient[k] = min(max(gradient[k], -most), most)
    if norm > np.float32(0):
        length = np.sqrt(_squares(gradient, begin, end))
        if length > norm:
            for k in range(begin, end):
                gradient[k] *= norm / length


@part(fastmath=True)
def to_direction(gradient, states, squares, state, square, kind, numbers, dim):  # type: ignore[no-untyped-def]
    """Update the row's states and replace its gradient with the direction. Return the factor of the direction."""
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
def add_penalty(gradient, weights, halves, is_half, at, l2, dim):  # type: ignore[no-untyped-def]
    if l2 == np.float32(0):
        return
    if is_half:
        for k in range(dim):
            gradient[k] += l2 * widen(halves[at + k])
    else:
        for k in range(dim):
            gradient[k] += l2 * weights[at + k]
