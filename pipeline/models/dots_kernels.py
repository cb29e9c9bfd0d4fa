"""Turn rows into their pairs' dot products and back on the CPU: arrays in, arrays filled, compiled by Numba.

A sample's rows are a matrix of some 27 x 16 numbers: too small for a library's product, which takes most of its time to
begin, and whose result has yet to be picked apart. Here a sample stays in the first cache from its rows to its pairs.
Numba does not keep sums in registers by itself, so the one inner loop is written in LLVM's own terms.

Indexes are unsigned: Numba then leaves out its check for negative ones. bf16 comes and goes as uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

U = np.uint64
LANES = 16
BLOCK = 8  # rows at a time
FLOATS, INDEX, LANE = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64), ir.IntType(32)
NOTHING = ir.Constant(FLOATS, ir.Undefined)


def _vector(builder: Any, array: Any, index: Any) -> Any:
    """Where array[index:][:16] lies."""
    return builder.bitcast(builder.gep(array, [index]), FLOATS.as_pointer())


def _make_product(num_rows: int, num_vectors: int) -> Any:
    """A product of `num_rows` rows with 16 * num_vectors columns: as many sums as there are registers for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def data(position: int) -> Any:
            return context.make_array(signature.args[position])(context, builder, arguments[position]).data

        def vector_at(array: Any, index: Any, vector: int) -> Any:
            return _vector(builder, array, builder.add(index, INDEX(LANES * vector)))

        left, right, into = data(0), data(4), data(8)
        _, left_begin, row_step, left_step, _, right_begin, right_step, count, _, into_begin, into_step = arguments
        start, loop, done = builder.block, builder.append_basic_block("along"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, left_at, right_at = (builder.phi(INDEX) for _ in range(3))
        sums = [[builder.phi(FLOATS) for _ in range(num_vectors)] for _ in range(num_rows)]
        vectors = [builder.load(vector_at(right, right_at, v), align=4) for v in range(num_vectors)]
        for phi, first, step in (
            (index, INDEX(0), INDEX(1)), (left_at, left_begin, left_step), (right_at, right_begin, right_step)
        ):  # fmt: skip
            phi.add_incoming(first, start)
            phi.add_incoming(builder.add(phi, step), loop)
        row_at, totals = left_at, []
        for row in sums:
            scalar = builder.insert_element(NOTHING, builder.load(builder.gep(left, [row_at])), LANE(0))
            scalar = builder.shuffle_vector(scalar, NOTHING, ir.Constant(ir.VectorType(LANE, LANES), [0] * LANES))
            products = [builder.fmul(scalar, vector, flags=("contract",)) for vector in vectors]
            totals.append([builder.fadd(p, total, flags=("contract",)) for p, total in zip(products, row, strict=True)])
            row_at = builder.add(row_at, row_step)
            for phi, total in zip(row, totals[-1], strict=True):
                phi.add_incoming(ir.Constant(FLOATS, [0.0] * LANES), start)
                phi.add_incoming(total, loop)
        builder.cbranch(builder.icmp_unsigned("<", builder.add(index, INDEX(1)), count), loop, done)
        builder.position_at_end(done)
        place = into_begin
        for row in totals:
            for v, total in enumerate(row):
                builder.store(total, vector_at(into, place, v), align=4)
            place = builder.add(place, into_step)
        return context.get_dummy_value()

    return generate


def _signature(left: Any, right: Any, into: Any) -> Signature:
    u = types.uint64
    return types.void(left, u, u, u, right, u, u, u, into, u, u)


@intrinsic  # type: ignore[untyped-decorator]
def _product_8x16(  # type: ignore[no-untyped-def]
    _, left, left_begin, row_step, left_step, right, right_begin, right_step, count, into, into_begin, into_step
):
    """into[into_begin + r * into_step :][:16] = sum over k < count of left[left_begin + r * row_step + k * left_step] *
    right[right_begin + k * right_step :][:16], for the rows r < 8."""
    return _signature(left, right, into), _make_product(BLOCK, 1)


@intrinsic  # type: ignore[untyped-decorator]
def _product_8x32(  # type: ignore[no-untyped-def]
    _, left, left_begin, row_step, left_step, right, right_begin, right_step, count, into, into_begin, into_step
):
    """As _product_8x16, of 32 columns."""
    return _signature(left, right, into), _make_product(BLOCK, 2)


@intrinsic  # type: ignore[untyped-decorator]
def _product_4x64(  # type: ignore[no-untyped-def]
    _, left, left_begin, row_step, left_step, right, right_begin, right_step, count, into, into_begin, into_step
):
    """As _product_8x16, of 4 rows and 64 columns."""
    return _signature(left, right, into), _make_product(4, 4)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _product(left, begin, row_step, step, right, at, right_step, count, into, place, width):  # type: ignore[no-untyped-def]
    """8 rows of `width` columns, a multiple of 16; rows of `into` are `width` apart."""
    c = U(0)
    while c < width:
        if width - c >= U(64):
            for r in range(U(0), U(BLOCK), U(4)):
                first, row = begin + r * row_step, place + r * width
                _product_4x64(left, first, row_step, step, right, at + c, right_step, count, into, row + c, width)
            c += U(64)
        elif width - c >= U(32):
            _product_8x32(left, begin, row_step, step, right, at + c, right_step, count, into, place + c, width)
            c += U(32)
        else:
            _product_8x16(left, begin, row_step, step, right, at + c, right_step, count, into, place + c, width)
            c += U(16)


@intrinsic  # type: ignore[untyped-decorator]
def _copy_16(_, source, begin, into, place):  # type: ignore[no-untyped-def]
    """into[place:][:16] = source[begin:][:16]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, into = (context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2))
        numbers = builder.load(_vector(builder, source, arguments[1]), align=4)
        builder.store(numbers, _vector(builder, into, arguments[3]), align=4)
        return context.get_dummy_value()

    return types.void(source, types.uint64, into, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _transpose_16(_, source, begin, row_step, into, place, into_step):  # type: ignore[no-untyped-def]
    """into[place + k * into_step + r] = source[begin + r * row_step + k] for r, k < 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, into = (context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 3))
        at, rows = arguments[1], []
        for _row in range(LANES):
            rows.append(builder.load(_vector(builder, source, at), align=4))
            at = builder.add(at, arguments[2])
        for distance in (8, 4, 2, 1):  # exchanges blocks of that size across the diagonal, then within them
            low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
            high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
            for row in (row for row in range(LANES) if not row & distance):
                pair = rows[row], rows[row + distance]
                for to, order in ((row, low), (row + distance, high)):
                    rows[to] = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(LANE, LANES), order))
        at = arguments[4]
        for numbers in rows:
            builder.store(numbers, _vector(builder, into, at), align=4)
            at = builder.add(at, arguments[5])
        return context.get_dummy_value()

    u = types.uint64
    return types.void(source, u, u, into, u, u), generate


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _write(row, count, into, into_half, at, is_half):  # type: ignore[no-untyped-def]
    """`count` numbers as they are, or as bf16 rounded to the nearest, halves to even."""
    if is_half:
        bits = row.view(np.uint32)
        for i in range(count):
            number = bits[i]
            number += np.uint32(0x7FFF) + ((number >> np.uint32(16)) & np.uint32(1))
            into_half[at + i] = np.uint16(number >> np.uint32(16))
    else:
        for i in range(count):
            into[at + i] = row[i]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _read(values, values_half, at, count, row, is_half):  # type: ignore[no-untyped-def]
    if is_half:
        bits = row.view(np.uint32)
        for i in range(count):
            bits[i] = np.uint32(values_half[at + i]) << np.uint32(16)
    else:
        for i in range(count):
            row[i] = values[at + i]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _multiple(number, of):  # type: ignore[no-untyped-def]
    return (number + of - U(1)) // of * of


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _copy_rows(source, at, count, dim, into, place, step):  # type: ignore[no-untyped-def]
    """`count` rows of `dim` numbers to rows `step` apart."""
    for r in range(count):
        if dim % U(LANES) == 0:
            for k in range(U(0), dim, U(LANES)):
                _copy_16(source, at + r * dim + k, into, place + r * step + k)
        else:
            for k in range(dim):
                into[place + r * step + k] = source[at + r * dim + k]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _transpose_rows(source, at, count, dim, into, place, step):  # type: ignore[no-untyped-def]
    """`count` rows of `dim` numbers to columns; rows of `into` are `step` apart."""
    if dim % U(LANES) == 0 and count >= U(LANES):
        for k in range(U(0), dim, U(LANES)):
            for first in range(U(0), count, U(LANES)):
                r = min(first, count - U(LANES))  # the last ones twice
                _transpose_16(source, at + r * dim + k, dim, into, place + k * step + r, step)
    else:
        for r in range(count):
            for k in range(dim):
                into[place + k * step + r] = source[at + r * dim + k]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def dots_forward(dense, rows, num_rows, dim, out, out_half, is_half, begin, end):  # type: ignore[no-untyped-def]
    """dense [B * D], rows [B * (n - 1) * D] -> out [B * (D + n (n - 1) / 2)], for samples begin..end; n = num_rows.

    `is_half`: into out_half as bf16, else into out.
    """
    n = U(num_rows)
    columns = _multiple(n, U(LANES))
    across = np.zeros(dim * columns, np.float32)  # [D, n]: the products' columns are neighbours
    products = np.empty(_multiple(n, U(BLOCK)) * columns + U(LANES), np.float32)
    width = dim + n * (n - U(1)) // U(2)
    row = np.empty(width + U(LANES), np.float32)
    for sample in range(begin, end):
        for k in range(dim):
            row[k] = across[k * columns] = dense[sample * dim + k]
        _transpose_rows(rows, sample * (n - U(1)) * dim, n - U(1), dim, across, U(1), columns)
        for r in range(U(0), n, U(BLOCK)):
            _product(across, r, U(1), columns, across, U(0), columns, dim, products, r * columns, columns)
        at = dim
        for r in range(n - U(1)):
            for c in range(r + U(1), n, U(LANES)):  # what is too many is written over by the next row
                _copy_16(products, r * columns + c, row, at + c - r - U(1))
            at += n - U(1) - r
        _write(row, width, out, out_half, sample * width, is_half)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def dots_backward(  # type: ignore[no-untyped-def]
    dense, rows, gradient, gradient_half, is_half, num_rows, dim, to_dense, to_rows, begin, end
):  # fmt: skip
    """gradient [B * (D + n (n - 1) / 2)] (gradient_half: as bf16) -> to_dense [B * D], to_rows [B * (n - 1) * D].

    With G the pairs' gradients above a diagonal of zeros, the gradient of X is (G + G^T) X.
    """
    n = U(num_rows)
    across, columns = _multiple(dim, U(LANES)), _multiple(n, U(BLOCK)) + U(LANES)
    x = np.zeros(n * across, np.float32)
    pairs = np.zeros(_multiple(n, U(BLOCK)) * columns, np.float32)
    upper = np.empty(_multiple(n, U(BLOCK)) * across, np.float32)
    lower = np.empty_like(upper)
    width = dim + n * (n - U(1)) // U(2)
    row = np.empty(width + U(LANES), np.float32)
    for sample in range(begin, end):
        _copy_rows(dense, sample * dim, U(1), dim, x, U(0), across)
        _copy_rows(rows, sample * (n - U(1)) * dim, n - U(1), dim, x, across, across)
        _read(gradient, gradient_half, sample * width, width, row, is_half)
        at = dim
        for r in range(n - U(1)):
            for c in range(r + U(1), n, U(LANES)):  # what is too many lies beyond column n, where nobody looks
                _copy_16(row, at + c - r - U(1), pairs, r * columns + c)
            at += n - U(1) - r
        for r in range(U(0), n, U(BLOCK)):
            _product(pairs, r * columns + r, columns, U(1), x, r * across, across, n - r, upper, r * across, across)
            below = min(r + U(BLOCK), n)
            _product(pairs, r, U(1), columns, x, U(0), across, below, lower, r * across, across)
        for i in range(n * across):
            upper[i] += lower[i]
        for k in range(dim):
            row[k] += upper[k]
        _copy_rows(row, U(0), U(1), dim, to_dense, sample * dim, dim)
        if dim == across:
            _copy_rows(upper, across, n - U(1), dim, to_rows, sample * (n - U(1)) * dim, dim)
        else:
            for r in range(U(1), n):
                for k in range(dim):
                    to_rows[(sample * (n - U(1)) + r - U(1)) * dim + k] = upper[r * across + k]
