"""Update tables in position on the CPU by kernels that Numba compiles.

update_tables takes pooled gradients. Each row that a batch touched is updated once with the sum of its gradients, as
FBGEMM's exact optimizers do. FBGEMM sorts the ids of every table for that; here a hash table chains the positions of each
row, in their order, so the sums do not depend on threads. The next rows are prefetched, for the time goes into waiting for
memory. update_rows takes the dense gradient of many small replicated tables, which lie one after the other in fp32 arrays,
as FBGEMM's dense lookup has them.

fp16 tables come as uint16. Their rows are computed in fp32 and rounded up or down at random, in proportion: rounding to the
nearest would lose every update below 1/2048 of a weight. The random number is a hash of the step, the table's offset and the row, so
it is the same on any number of threads, and in a resumed run.

Shapes: F features, B samples, L ids, T tables, D the width of a row. Weights and states of all tables lie one after
the other in 1-D arrays. Every index is unsigned: Numba then leaves out its check for negative ones, and LLVM vectorises.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.sharding.kernels.llvm_intrinsics import (
    LANES,
    add_1,
    add_16,
    bits,
    from_bits,
    narrow,
    prefetch_to_read,
    prefetch_to_write,
    widen,
)

SGD, ADAGRAD, ROWWISE_ADAGRAD = 0, 1, 2
U = np.uint64
HASH = U(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: multiplicative hashing (Knuth, TAOCP 3, 6.4)
AHEAD = 8  # rows


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _add(into, gradients, begin, scale, dim):  # type: ignore[no-untyped-def]
    whole = dim // U(LANES) * U(LANES)
    for k in range(U(0), whole, U(LANES)):
        add_16(into, k, gradients, begin + k, scale)
    for k in range(whole, dim):
        add_1(into, k, gradients, begin + k, scale)


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _subtract(into, at, gradient, scale, dim):  # type: ignore[no-untyped-def]
    for k in range(dim):
        into[at + k] -= scale * gradient[k]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rounded(value, key):  # type: ignore[no-untyped-def]
    """fp32 -> fp16 as uint16: to a neighbour, chosen by `key` with the probability that makes the mean `value`."""
    key ^= key >> U(33)  # the finaliser of MurmurHash3
    key *= U(0xFF51AFD7ED558CCD)
    key ^= key >> U(33)
    offset = np.float32(key >> U(40)) * np.float32(2.0**-24) - np.float32(0.5)
    exponent = max((bits(value) >> np.uint32(23)) & np.uint32(0xFF), np.uint32(113))  # 113: 2^-14, fp16's least normal
    step = from_bits(np.uint32((exponent - np.uint32(10)) << np.uint32(23)))  # between neighbours
    return narrow(min(max(value + offset * step, np.float32(-65504)), np.float32(65504)))


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _subtract_half(into, at, gradient, scale, dim, key):  # type: ignore[no-untyped-def]
    for k in range(dim):
        into[at + k] = _rounded(widen(into[at + k]) - scale * gradient[k], key + U(k))


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _adagrad_half(weights, at, states, state_at, gradient, lr, eps, dim, key):  # type: ignore[no-untyped-def]
    for k in range(dim):
        square = states[state_at + k] + gradient[k] * gradient[k]
        states[state_at + k] = square
        update = lr * gradient[k] / (np.sqrt(square) + eps)
        weights[at + k] = _rounded(widen(weights[at + k]) - update, key + U(k))


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _mean_square(gradient, dim):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(dim):
        total += gradient[k] * gradient[k]
    return total / np.float32(dim)


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _adagrad(weights, states, at, gradient, lr, eps, dim):  # type: ignore[no-untyped-def]
    for k in range(dim):
        square = states[at + k] + gradient[k] * gradient[k]
        states[at + k] = square
        weights[at + k] -= lr * gradient[k] / (np.sqrt(square) + eps)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _chain(indices, begin, end, slots, rows, heads, tails, following):  # type: ignore[no-untyped-def]
    """Distinct ids of indices[begin:end] into `rows`, and for each the chain of its positions; the number of ids."""
    mask = U(len(slots) - 1)
    slots[:] = -1
    count = U(0)
    for position in range(begin, end):
        row = indices[position]
        slot = ((U(row) * HASH) >> U(32)) & mask
        while slots[slot] >= 0 and rows[U(slots[slot])] != row:
            slot = (slot + U(1)) & mask
        following[position - begin] = -1
        if slots[slot] < 0:
            slots[slot] = count
            rows[count] = row
            heads[count] = tails[count] = position - begin
            count += U(1)
        else:
            entry = U(slots[slot])
            following[U(tails[entry])] = position - begin
            tails[entry] = position - begin
    return count


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _bags(offsets, first_bag, last_bag, num_samples, begin, is_mean, sources, scales):  # type: ignore[no-untyped-def]
    """For each position in a table's ids: its bag, and the factor of its gradient."""
    for bag in range(first_bag, last_bag):
        first, last = U(offsets[bag]), U(offsets[bag + U(1)])
        scale = np.float32(1)
        if is_mean and last > first:
            scale = np.float32(1) / np.float32(last - first)
        for position in range(first, last):
            sources[position - begin] = bag
            scales[position - begin] = scale


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _buffer_sizes(tables, feature_begins, offsets, num_samples):  # type: ignore[no-untyped-def]
    """The ids of the table that has most, and slots for a hash table of them: a power of two."""
    longest = U(0)
    for table in tables:
        first, last = U(feature_begins[table]) * num_samples, U(feature_begins[table + 1]) * num_samples
        longest = max(longest, U(offsets[last]) - U(offsets[first]))
    size = U(16)
    while size < U(2) * longest:
        size *= U(2)
    return longest, size


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def update_tables(  # type: ignore[no-untyped-def]
    tables, feature_begins, indices, offsets, num_samples, gradients, width, columns, weights, halves, is_half,
    weight_begins, states, state_begins, kind, is_mean, lr, eps, step,
):  # fmt: skip
    """Update the tables whose numbers are in `tables`, in `halves` (fp16 as uint16) where `is_half`, else in `weights`.

    Nineteen parameters, because Numba compiles arrays and numbers: a structure would be boxed or copied at each call.

    feature_begins [T + 1]: a table's features are neighbours. offsets [F * B + 1] into indices [L].
    gradients: fp32, or bf16 as uint16; sample b's begin at b * width, feature f's at columns [F + 1] from there.
    """
    longest, size = _buffer_sizes(tables, feature_begins, offsets, num_samples)
    slots, following = np.empty(size, np.int32), np.empty(longest, np.int32)
    rows, heads, tails = np.empty(longest, np.int64), np.empty(longest, np.int32), np.empty(longest, np.int32)
    sources, scales = np.empty(longest, np.uint64), np.empty(longest, np.float32)
    for table in tables:
        first, last = U(feature_begins[table]), U(feature_begins[table + 1])
        begin, end = U(offsets[first * num_samples]), U(offsets[last * num_samples])
        dim = U(columns[first + U(1)] - columns[first])
        weight_begin, state_begin = U(weight_begins[first]), U(state_begins[first])
        count = _chain(indices, begin, end, slots, rows, heads, tails, following)
        _bags(offsets, first * num_samples, last * num_samples, num_samples, begin, is_mean, sources, scales)
        gradient = np.empty(dim, np.float32)
        for entry in range(count):
            if entry + U(AHEAD) < count:
                coming = U(rows[entry + U(AHEAD)])
                if is_half:
                    for k in range(U(0), dim, U(32)):
                        prefetch_to_write(halves, weight_begin + coming * dim + k)
                else:
                    for k in range(U(0), dim, U(16)):
                        prefetch_to_write(weights, weight_begin + coming * dim + k)
                if kind == ROWWISE_ADAGRAD:
                    prefetch_to_write(states, state_begin + coming)
                source = sources[U(heads[entry + U(AHEAD)])]
                prefetch_to_read(gradients, source % num_samples * width + U(columns[source // num_samples]))
            gradient[:] = np.float32(0)
            position = heads[entry]
            while position >= 0:
                bag = sources[U(position)]
                feature, sample = bag // num_samples, bag % num_samples
                _add(gradient, gradients, sample * width + U(columns[feature]), scales[U(position)], dim)
                position = following[U(position)]
            at = weight_begin + U(rows[entry]) * dim
            scale = lr
            if kind == ROWWISE_ADAGRAD:
                state = state_begin + U(rows[entry])
                states[state] += _mean_square(gradient, dim)
                scale = lr / (np.sqrt(states[state]) + eps)
            if is_half:
                key = (U(step) * HASH) ^ (at * U(0xD6E8FEB86659FD93))
                if kind == ADAGRAD:
                    state = state_begin + U(rows[entry]) * dim
                    _adagrad_half(halves, at, states, state, gradient, lr, eps, dim, key)
                else:
                    _subtract_half(halves, at, gradient, scale, dim, key)
            elif kind == ADAGRAD:
                _adagrad(weights, states, at, gradient, lr, eps, dim)
            else:
                _subtract(weights, at, gradient, scale, dim)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _largest(values, begin, end):  # type: ignore[no-untyped-def]
    largest = np.float32(0)
    for k in range(begin, end):
        value = abs(values[k])
        if not value <= largest:  # NaN too
            largest = value
    return largest


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def _squares(gradient, begin, end):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(begin, end):
        total += gradient[k] * gradient[k]
    return total


@njit(nogil=True, fastmath=True, cache=True)  # type: ignore[untyped-decorator]
def update_rows(weights, gradient, states, rows, dims, kind, lr, eps):  # type: ignore[no-untyped-def]
    """SGD, Adagrad or row-wise Adagrad; tables have `rows` [T] of `dims` [T], states a number a weight, or a row.

    A row whose gradient is all zero would stay as it is by the formulas too: it is not written to.
    """
    begin, state = U(0), U(0)
    for table in range(len(rows)):
        dim = U(dims[table])
        for _ in range(rows[table]):
            end = begin + dim
            if _largest(gradient, begin, end) != np.float32(0):
                if kind == ADAGRAD:
                    for k in range(begin, end):
                        states[k] += gradient[k] * gradient[k]
                        weights[k] -= lr * gradient[k] / (np.sqrt(states[k]) + eps)
                else:
                    scale = lr
                    if kind == ROWWISE_ADAGRAD:
                        states[state] += _squares(gradient, begin, end) / np.float32(dim)
                        scale = lr / (np.sqrt(states[state]) + eps)
                    for k in range(begin, end):
                        weights[k] -= scale * gradient[k]
            begin = end
            state += U(1)
