"""Run a stack of narrow linear layers, forward and backward, a block of samples at a time: compiled
by Numba.

torch runs each product, sum and relu as a separate operation and wakes its threads for each. For
narrow layers that takes longer than the arithmetic. Here the numbers of a block stay in the cache
from the first layer to the last. The gradient of a weight is summed over the blocks of a group, and
groups are added in a fixed order, so threads change no bit.

Widths are padded with zeros to a multiple of 16. Arrays are flat and positions unsigned. P(n) is
width n after padding. `forth` and `back` hold each layer's weights for forward, [P(inputs),
P(outputs)], and transposed for backward. acts: each layer's outputs [blocks * ROWS, P]. shape:
widths (the inputs' width first), and the lower limit of each layer's outputs, which is 0 if relu
follows. Numbers are fp32.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.llvm_intrinsics import LANES, multiply_8x1, multiply_8x2, transpose_16
from pipeline.devices.cpu.kernels.parts import move, part

U = np.uint64
L = U(LANES)
ROWS = U(128)  # samples of a block
ZERO = np.float32(0)


@part()
def _pad(width):  # type: ignore[no-untyped-def]
    return (width + L - U(1)) // L * L


@part()
def _widest(sizes):  # type: ignore[no-untyped-def]
    widest = U(0)
    for size in sizes:
        widest = max(widest, _pad(size))
    return widest


@part()
def _multiply(left, rows, right, out):  # type: ignore[no-untyped-def]
    """Set out (array, begin) = left (array, begin, numbers per row) times right (array, begin,
    width, rows).

    The `rows` of left are a multiple of 8; the width is a multiple of 16.
    """
    a, at, step = left
    b, begin, width, count = right
    c, into = out
    column = U(0)
    while column < width:
        is_pair = width - column >= U(2) * L
        for row in range(U(0), rows, U(8)):
            here, place = at + row * step, into + row * width + column
            if is_pair:
                multiply_8x2(a, here, step, b, begin + column, width, count, c, place, width)
            else:
                multiply_8x1(a, here, step, b, begin + column, width, count, c, place, width)
        column += U(2) * L if is_pair else L


@njit(nogil=True, cache=True)
def pack(weights, sizes, forth, back, biases):  # type: ignore[no-untyped-def]
    """Pack the weights into the kernels' arrays. weights: [outputs, inputs] and the bias of each layer."""
    at, place, bias = U(0), U(0), U(0)
    back[:] = ZERO
    biases[:] = ZERO
    for layer in range(len(sizes) - 1):
        inputs, outputs = sizes[layer], sizes[layer + 1]
        across, down = _pad(inputs), _pad(outputs)
        for row in range(outputs):
            move(weights, at + row * inputs, back, place + row * across, inputs)
        for row in range(U(0), down, L):
            for k in range(U(0), across, L):
                transpose_16(back, place + row * across + k, across, forth, place + k * down + row, down)
        move(weights, at + outputs * inputs, biases, bias, outputs)
        at += outputs * inputs + outputs
        place += across * down
        bias += down


@part()
def _finish(values, at, width, rows, biases, bias, floor):  # type: ignore[no-untyped-def]
    """Add the biases, then apply relu if `floor` is 0. NaN stays NaN."""
    for row in range(rows):
        for k in range(width):
            value = values[at + row * width + k] + biases[bias + k]
            values[at + row * width + k] = floor if value < floor else value


@njit(nogil=True, cache=True)
def forward(inputs, packed, shape, acts, out, num_samples, begin, end):  # type: ignore[no-untyped-def]
    """Fill acts and out [B, outputs] from inputs [B, inputs], for the blocks begin..end. packed: forth and biases."""
    (forth, biases), (sizes, floors) = packed, shape
    num_layers, all_rows = len(sizes) - 1, (num_samples + ROWS - U(1)) // ROWS * ROWS
    first = np.zeros(ROWS * _pad(sizes[0]), np.float32)
    for block in range(begin, end):
        rows = _load_block(inputs, sizes[0], block, num_samples, first)
        place, bias, source, target = U(0), U(0), U(0), U(0)
        for layer in range(num_layers):
            count, wide, down = sizes[layer], _pad(sizes[layer]), _pad(sizes[layer + 1])
            here, right = target + block * ROWS * down, (forth, place, down, count)
            if layer == 0:
                _multiply((first, U(0), wide), rows, right, (acts, here))
            else:
                _multiply((acts, source + block * ROWS * wide, wide), rows, right, (acts, here))
            _finish(acts, here, down, rows, biases, bias, floors[layer])
            source = target
            target += all_rows * down
            place += wide * down
            bias += down
        _store_block(acts, source + block * ROWS * _pad(sizes[num_layers]), sizes[num_layers], block, num_samples, out)


@part()
def _load_block(source, width, block, num_samples, into):  # type: ignore[no-untyped-def]
    """Copy a block's rows of [B, width] to [ROWS, P], and set the rest of the block to 0. Return
    the number of rows, rounded up to eights.
    """
    across, first = _pad(width), block * ROWS
    rows = min(ROWS, num_samples - first)
    for row in range(rows):
        move(source, (first + row) * width, into, row * across, width)
    into[rows * across : ROWS * across] = ZERO
    return (rows + U(7)) // U(8) * U(8)


@part()
def _store_block(source, at, width, block, num_samples, into):  # type: ignore[no-untyped-def]
    """Copy the rows of a block [ROWS, P], which begins at `at`, to [B, width]."""
    across, first = _pad(width), block * ROWS
    for row in range(min(ROWS, num_samples - first)):
        move(source, at + row * across, into, (first + row) * width, width)


@part()
def _through_bias(acts, begin, floor, gradient, width, rows, sums, turned):  # type: ignore[no-untyped-def]
    """Apply relu's derivative to the gradient [ROWS, P] in place, add the gradient to the bias's
    sums, and transpose it.
    """
    if floor == ZERO:
        for k in range(rows * width):
            gradient[k] = ZERO if acts[begin + k] <= ZERO else gradient[k]
    for row in range(rows):
        for k in range(width):
            sums[k] += gradient[row * width + k]
    for row in range(U(0), ROWS, L):
        for k in range(U(0), width, L):
            transpose_16(gradient, row * width + k, width, turned, k * ROWS + row, ROWS)


@njit(nogil=True, cache=True)
def backward(given, back, shape, sums, to_inputs, num_groups, begin, end):  # type: ignore[no-untyped-def]
    """Fill the weights' gradients of groups begin..end, and to_inputs [B, inputs] (or an empty [0]
    if not needed).

    given: the outputs' gradient [B, outputs], inputs, acts and B. sums [groups, ..]: for each layer
    [P(outputs), P(inputs)], then [P(outputs)] for the bias.
    """
    (gradient, inputs, acts, num_samples), (sizes, floors) = given, shape
    num_layers, widest = len(sizes) - 1, _widest(sizes)
    all_blocks = (num_samples + ROWS - U(1)) // ROWS
    total, last_place, last_acts = ends(sizes, all_blocks * ROWS)
    here, there = np.zeros(ROWS * widest, np.float32), np.zeros(ROWS * widest, np.float32)
    turned, first = np.empty(ROWS * widest, np.float32), np.zeros(ROWS * _pad(sizes[0]), np.float32)
    products = np.empty(widest * widest, np.float32)
    for group in range(begin, end):
        own = sums[group * total : (group + U(1)) * total]
        own[:] = ZERO
        for block in range(group * all_blocks // num_groups, (group + U(1)) * all_blocks // num_groups):
            rows = _load_block(inputs, sizes[0], block, num_samples, first)
            here[: ROWS * _pad(sizes[num_layers])] = ZERO
            _load_block(gradient, sizes[num_layers], block, num_samples, here)
            place, act, at = last_place, last_acts, total
            for layer in range(num_layers - 1, -1, -1):
                wide, down = _pad(sizes[layer]), _pad(sizes[layer + 1])
                place -= wide * down
                act -= all_blocks * ROWS * down
                at -= down
                _through_bias(acts, act + block * ROWS * down, floors[layer], here, down, rows, own[at:], turned)
                at -= wide * down
                left, out = (turned, U(0), ROWS), (products, U(0))
                if layer == 0:
                    _multiply(left, down, (first, U(0), wide, rows), out)
                else:
                    below = act - all_blocks * ROWS * wide + block * ROWS * wide
                    _multiply(left, down, (acts, below, wide, rows), out)
                for k in range(wide * down):
                    own[at + k] += products[k]
                if layer > 0 or len(to_inputs) > 0:
                    _multiply((here, U(0), down), rows, (back, place, wide, sizes[layer + 1]), (there, U(0)))
                    here, there = there, here
            if len(to_inputs) > 0:
                _store_block(here, U(0), sizes[0], block, num_samples, to_inputs)


@part()
def ends(sizes, all_rows):  # type: ignore[no-untyped-def]
    """Return the lengths of the sums of one group, of all packed weights, and of all acts."""
    total, places, acts = U(0), U(0), U(0)
    for layer in range(len(sizes) - 1):
        wide, down = _pad(sizes[layer]), _pad(sizes[layer + 1])
        total += wide * down + down
        places += wide * down
        acts += all_rows * down
    return total, places, acts
