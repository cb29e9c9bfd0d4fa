"""Run a stack of narrow linear layers, forward and backward, a block of samples at a time: compiled by Numba.

torch runs each product, sum and relu as an operation of its own, on threads that must be woken for each; of narrow layers that takes longer than
their arithmetic. Here a block's numbers stay in the cache from the first layer to the last. Sums are fp32; factors are fp32, or rounded to bf16
(pipeline.devices.cpu.kernels.layer_intrinsics). A weight's gradient is summed by groups of blocks and these in their order, so threads change no bit.

Widths are padded to a multiple of 16, a number P for a width; padding is 0. Arrays are flat, and positions unsigned. `forth` and `back` hold
each layer's weights as both directions multiply by them, [P of inputs, P of outputs] and [P of outputs, P of inputs], in bf16 two rows in one.
acts: of each layer its outputs [blocks * ROWS, P], in fp32. sizes [L + 1]: widths, of the inputs first. floors [L]: what no output is less than.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.layer_intrinsics import lay_16, product_8x1, product_8x2
from pipeline.devices.cpu.kernels.llvm_intrinsics import LANES, transpose_16
from pipeline.devices.cpu.kernels.parts import move, part

U = np.uint64
L = U(LANES)
ROWS = U(128)  # samples of a block
NO_FLOOR = np.float32(-np.inf)


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
def _lay(source, at, width, rows, per, into, position):  # type: ignore[no-untyped-def]
    """Rows [rows, width] as a product's second factor; `per`: rows that one holds."""
    for row in range(U(0), rows, per):
        for k in range(U(0), width, L):
            lay_16(source, at + row * width + k, width, into, position + row // per * width + k)


@part()
def _multiply(a, at, step, rows, b, begin, width, count, start, first, start_step, floor, c, into):  # type: ignore[no-untyped-def]
    """c [rows, width] at `into` = start + a b, for rows in eights and columns in sixteens (product_8x1)."""
    column = U(0)
    while column < width:
        is_pair = width - column >= U(2) * L
        for row in range(U(0), rows, U(8)):
            left, place = at + row * step, into + row * width + column
            begins = first + row * start_step + column
            if is_pair:
                product_8x2(
                    a, left, step, b, begin + column, width, count, start, begins, start_step, floor, c, place, width
                )
            else:
                product_8x1(
                    a, left, step, b, begin + column, width, count, start, begins, start_step, floor, c, place, width
                )
        column += U(2) * L if is_pair else L


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def pack(weights, sizes, per, forth, back, biases):  # type: ignore[no-untyped-def]
    """weights: of each layer [outputs, inputs] and its bias."""
    widest = _widest(sizes)
    plain, turned = np.empty(widest * widest, np.float32), np.empty(widest * widest, np.float32)
    at, place, bias = U(0), U(0), U(0)
    for layer in range(len(sizes) - 1):
        inputs, outputs = sizes[layer], sizes[layer + 1]
        across, down = _pad(inputs), _pad(outputs)
        plain[: across * down] = np.float32(0)
        for row in range(outputs):
            move(weights, at + row * inputs, plain, row * across, inputs)
        for row in range(U(0), down, L):
            for k in range(U(0), across, L):
                transpose_16(plain, row * across + k, across, turned, k * down + row, down)
        _lay(plain, U(0), across, down, per, back, place)
        _lay(turned, U(0), down, across, per, forth, place)
        biases[bias : bias + down] = np.float32(0)
        move(weights, at + outputs * inputs, biases, bias, outputs)
        at += outputs * inputs + outputs
        place += across * down // per
        bias += down


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def forward(inputs, forth, biases, sizes, floors, acts, out, num_samples, begin, end):  # type: ignore[no-untyped-def]
    """acts and out [B, outputs], of inputs [B, inputs], for the blocks begin..end; fp32 factors."""
    num_layers, all_rows = len(sizes) - 1, (num_samples + ROWS - U(1)) // ROWS * ROWS
    across = _pad(sizes[0])
    first = np.zeros(ROWS * across, np.float32)
    for block in range(begin, end):
        rows = _load_block(inputs, sizes[0], block, num_samples, first)
        place, bias, source, target = U(0), U(0), U(0), U(0)
        for layer in range(num_layers):
            count, wide, down = sizes[layer], _pad(sizes[layer]), _pad(sizes[layer + 1])
            here = target + block * ROWS * down
            if layer == 0:
                _multiply(
                    first, U(0), wide, rows, forth, place, down, count, biases, bias, U(0), floors[layer], acts, here
                )
            else:
                at = source + block * ROWS * wide
                _multiply(
                    acts, at, wide, rows, forth, place, down, count, biases, bias, U(0), floors[layer], acts, here
                )
            source = target
            target += all_rows * down
            place += wide * down
            bias += down
        _store_block(acts, source, sizes[num_layers], block, num_samples, out)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def forward_bf16(inputs, forth, biases, sizes, floors, acts, out, num_samples, begin, end):  # type: ignore[no-untyped-def]
    """As forward, with factors in bf16."""
    num_layers, all_rows = len(sizes) - 1, (num_samples + ROWS - U(1)) // ROWS * ROWS
    first = np.zeros(ROWS * _pad(sizes[0]), np.float32)
    lefts = np.empty(ROWS * _widest(sizes), np.uint16)
    for block in range(begin, end):
        rows = _load_block(inputs, sizes[0], block, num_samples, first)
        place, bias, source, target = U(0), U(0), U(0), U(0)
        for layer in range(num_layers):
            pairs, wide, down = (sizes[layer] + U(1)) // U(2), _pad(sizes[layer]), _pad(sizes[layer + 1])
            here = target + block * ROWS * down
            if layer == 0:
                move(first, U(0), lefts, U(0), rows * wide)
            else:
                move(acts, source + block * ROWS * wide, lefts, U(0), rows * wide)
            _multiply(lefts, U(0), wide, rows, forth, place, down, pairs, biases, bias, U(0), floors[layer], acts, here)
            source = target
            target += all_rows * down
            place += wide * down // U(2)
            bias += down
        _store_block(acts, source, sizes[num_layers], block, num_samples, out)


@part()
def _load_block(source, width, block, num_samples, into):  # type: ignore[no-untyped-def]
    """into [ROWS, P] = a block's rows of [B, width], and 0 after the last row; their number in eights."""
    across, first = _pad(width), block * ROWS
    rows = min(ROWS, num_samples - first)
    for row in range(rows):
        move(source, (first + row) * width, into, row * across, width)
    into[rows * across : ROWS * across] = np.float32(0)
    return (rows + U(7)) // U(8) * U(8)


@part()
def _store_block(source, begin, width, block, num_samples, into):  # type: ignore[no-untyped-def]
    """into [B, width] = a block's rows of [.., P], which begin at `begin`."""
    across, first = _pad(width), block * ROWS
    for row in range(first, min(first + ROWS, num_samples)):
        move(source, begin + row * across, into, row * width, width)


@part()
def _mask(values, begin, gradient, count):  # type: ignore[no-untyped-def]
    """The gradient of relu, by its values."""
    for k in range(count):
        gradient[k] = np.float32(0) if values[begin + k] <= np.float32(0) else gradient[k]


@part()
def _add_rows(gradient, width, rows, sums, at):  # type: ignore[no-untyped-def]
    for row in range(rows):
        for k in range(width):
            sums[at + k] += gradient[row * width + k]


@part()
def _transpose(source, width, into):  # type: ignore[no-untyped-def]
    """[ROWS, width] -> [width, ROWS]"""
    for row in range(U(0), ROWS, L):
        for k in range(U(0), width, L):
            transpose_16(source, row * width + k, width, into, k * ROWS + row, ROWS)


@part()
def _through_bias(acts, begin, floor, gradient, width, rows, sums, at, turned):  # type: ignore[no-untyped-def]
    """A layer's gradient ahead of its relu, in place and transposed; its bias's is added to sums[at:]."""
    if floor == np.float32(0):
        _mask(acts, begin, gradient, rows * width)
    _add_rows(gradient, width, rows, sums, at)
    _transpose(gradient, width, turned)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def backward(  # type: ignore[no-untyped-def]
    gradient, inputs, back, sizes, floors, acts, sums, to_inputs, num_samples, num_groups, begin, end
):  # fmt: skip
    """sums [groups, ..] of the weights' gradients and to_inputs [B, inputs], or [0] for none, for the groups begin..end; fp32 factors.

    gradient: of the outputs [B, outputs]. A group's sums are, layer by layer, [P of outputs, P of inputs] and [P of outputs].
    """
    num_layers, widest = len(sizes) - 1, _widest(sizes)
    all_blocks = (num_samples + ROWS - U(1)) // ROWS
    total, last_place, last_acts = _ends(sizes, all_blocks * ROWS)
    here, there = np.zeros(ROWS * widest, np.float32), np.zeros(ROWS * widest, np.float32)
    turned, first = np.empty(ROWS * widest, np.float32), np.zeros(ROWS * _pad(sizes[0]), np.float32)
    nothing = np.zeros(U(2) * L + widest, np.float32)
    for group in range(begin, end):
        own = sums[group * total : (group + U(1)) * total]
        own[:] = np.float32(0)
        for block in range(group * all_blocks // num_groups, (group + U(1)) * all_blocks // num_groups):
            rows = _load_block(inputs, sizes[0], block, num_samples, first)
            here[: ROWS * _pad(sizes[num_layers])] = np.float32(0)
            _load_block(gradient, sizes[num_layers], block, num_samples, here)
            place, act, at = last_place, last_acts, total
            for layer in range(num_layers - 1, -1, -1):
                wide, down = _pad(sizes[layer]), _pad(sizes[layer + 1])
                place -= wide * down
                act -= all_blocks * ROWS * down
                at -= down
                _through_bias(acts, act + block * ROWS * down, floors[layer], here, down, rows, own, at, turned)
                at -= wide * down
                if layer == 0:
                    _multiply(turned, U(0), ROWS, down, first, U(0), wide, rows, own, at, wide, NO_FLOOR, own, at)
                else:
                    below = act - all_blocks * ROWS * wide + block * ROWS * wide
                    _multiply(turned, U(0), ROWS, down, acts, below, wide, rows, own, at, wide, NO_FLOOR, own, at)
                if layer > 0 or len(to_inputs) > 0:
                    count = sizes[layer + 1]
                    _multiply(
                        here, U(0), down, rows, back, place, wide, count, nothing, U(0), U(0), NO_FLOOR, there, U(0)
                    )
                    here, there = there, here
            if len(to_inputs) > 0:
                _store_from(here, sizes[0], block, num_samples, to_inputs)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def backward_bf16(  # type: ignore[no-untyped-def]
    gradient, inputs, back, sizes, floors, acts, sums, to_inputs, num_samples, num_groups, begin, end
):  # fmt: skip
    """As backward, with factors in bf16."""
    num_layers, widest, two = len(sizes) - 1, _widest(sizes), U(2)
    all_blocks = (num_samples + ROWS - U(1)) // ROWS
    total, last_place, last_acts = _ends(sizes, all_blocks * ROWS)
    here, there = np.zeros(ROWS * widest, np.float32), np.zeros(ROWS * widest, np.float32)
    turned, first = np.empty(ROWS * widest, np.float32), np.zeros(ROWS * _pad(sizes[0]), np.float32)
    lefts, rights = np.empty(ROWS * widest, np.uint16), np.empty(ROWS // two * widest, np.uint32)
    nothing = np.zeros(U(2) * L + widest, np.float32)
    last_place //= two
    for group in range(begin, end):
        own = sums[group * total : (group + U(1)) * total]
        own[:] = np.float32(0)
        for block in range(group * all_blocks // num_groups, (group + U(1)) * all_blocks // num_groups):
            rows = _load_block(inputs, sizes[0], block, num_samples, first)
            here[: ROWS * _pad(sizes[num_layers])] = np.float32(0)
            _load_block(gradient, sizes[num_layers], block, num_samples, here)
            place, act, at = last_place, last_acts, total
            for layer in range(num_layers - 1, -1, -1):
                wide, down = _pad(sizes[layer]), _pad(sizes[layer + 1])
                place -= wide * down // two
                act -= all_blocks * ROWS * down
                at -= down
                _through_bias(acts, act + block * ROWS * down, floors[layer], here, down, rows, own, at, turned)
                at -= wide * down
                move(turned, U(0), lefts, U(0), down * ROWS)
                if layer == 0:
                    _lay(first, U(0), wide, rows, two, rights, U(0))
                else:
                    _lay(acts, act - all_blocks * ROWS * wide + block * ROWS * wide, wide, rows, two, rights, U(0))
                _multiply(lefts, U(0), ROWS, down, rights, U(0), wide, rows // two, own, at, wide, NO_FLOOR, own, at)
                if layer > 0 or len(to_inputs) > 0:
                    pairs = (sizes[layer + 1] + U(1)) // two
                    move(here, U(0), lefts, U(0), rows * down)
                    _multiply(
                        lefts, U(0), down, rows, back, place, wide, pairs, nothing, U(0), U(0), NO_FLOOR, there, U(0)
                    )
                    here, there = there, here
            if len(to_inputs) > 0:
                _store_from(here, sizes[0], block, num_samples, to_inputs)


@part()
def _ends(sizes, all_rows):  # type: ignore[no-untyped-def]
    """The lengths of a group's sums, of all weights as they are multiplied in fp32, and of all acts."""
    total, places, acts = U(0), U(0), U(0)
    for layer in range(len(sizes) - 1):
        wide, down = _pad(sizes[layer]), _pad(sizes[layer + 1])
        total += wide * down + down
        places += wide * down
        acts += all_rows * down
    return total, places, acts


@part()
def _store_from(source, width, block, num_samples, into):  # type: ignore[no-untyped-def]
    """into [B, width] = the rows of a block [ROWS, P]."""
    across, first = _pad(width), block * ROWS
    for row in range(min(ROWS, num_samples - first)):
        move(source, row * across, into, (first + row) * width, width)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def add_groups(sums, sizes, num_groups, gradients, begin, end):  # type: ignore[no-untyped-def]
    """gradients: of each layer its weights' [outputs, inputs] and its bias's, in order; for the rows begin..end, of which a bias is one."""
    total, _, _ = _ends(sizes, U(0))
    line, at, place = U(0), U(0), U(0)
    for layer in range(len(sizes) - 1):
        inputs, outputs = sizes[layer], sizes[layer + 1]
        across, down = _pad(inputs), _pad(outputs)
        for row in range(outputs + U(1)):
            count = inputs if row < outputs else outputs
            if line >= begin and line < end:
                source, target = at + (row if row < outputs else down) * across, place + row * inputs
                move(sums, source, gradients, target, count)
                for group in range(U(1), num_groups):
                    for k in range(count):
                        gradients[target + k] += sums[group * total + source + k]
            line += U(1)
        at += across * down + down
        place += inputs * outputs + outputs
