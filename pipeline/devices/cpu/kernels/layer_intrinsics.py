"""Define LLVM intrinsics for products of layers: in fp32, or of pairs in bf16 where the CPU multiplies these (AVX512-BF16).

The second factor of a product, and what a loop lays out for it, is an array of float32, or of uint32, whose numbers each hold two in
bf16, of two rows that follow each other. The first factor then is uint16, bf16 in the order of memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import Signature

from pipeline.devices.cpu.kernels.llvm_intrinsics import (
    FLOAT,
    INT16,
    INT32,
    LANES,
    _across,
    _as_bf16_bits,
    _data,
    _load,
    _named,
    _offset,
    _splat,
    _store,
    _whole,
)

DOT = "llvm.x86.avx512bf16.dpbf16ps.512"  # sums + the products of pairs, in fp32


@cache
def multiplies_bf16() -> bool:
    """Whether this CPU has an instruction for products of bf16 pairs, beside others of this width.

    Asked once: LLVM parses the host's features anew each time, which takes as long as a kernel.
    """
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16", False))


def _multiplied(builder: Any, sums: Any, left: Any, right: Any, is_bf16: bool) -> Any:
    if not is_bf16:
        product = builder.fmul(left, right, flags=("contract",))
        return builder.fadd(sums, product, flags=("contract",))
    wide = ir.VectorType(INT32, LANES)
    kind = ir.FunctionType(sums.type, [sums.type, wide, wide])
    function = builder.module.globals.get(DOT) or ir.Function(builder.module, kind, DOT)
    return builder.call(function, [sums, left, right])


def _across_row(builder: Any, begin: Any, index: Any, is_bf16: bool) -> Any:
    """The number at an index of a row, or the pair in bf16, in every lane."""
    scalar = INT32 if is_bf16 else FLOAT
    value = builder.load(builder.gep(builder.bitcast(begin, scalar.as_pointer()), [index]), align=2 if is_bf16 else 4)
    nothing = ir.Constant(ir.VectorType(scalar, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, value, INT32(0)), nothing, _whole(INT32, LANES, 0))


def _make_product(rows: int, vectors: int) -> Any:
    """`rows` times `vectors` sums stay in registers while both factors go by."""

    def typed(  # fifteen numbers: an intrinsic takes no structure
        _: Any, a: Any, at: Any, step: Any, b: Any, begin: Any, width: Any, count: Any,
        start: Any, first: Any, start_step: Any, floor: Any, c: Any, into: Any, stride: Any,
    ) -> tuple[Signature, Any]:  # fmt: skip
        is_bf16 = b.dtype == types.uint32

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, right, starts, out = (_data(context, builder, signature, arguments, k) for k in (0, 3, 7, 11))
            _, at, step, _, begin, width, count, _, first, start_step, floor, _, into, stride = arguments
            kind = _across(FLOAT, LANES)
            sums = [[cgutils.alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
            for row, totals in enumerate(sums):
                begins_at = builder.add(first, builder.mul(start_step, _offset(row)))
                for vector, total in enumerate(totals):
                    place = builder.add(begins_at, _offset(LANES * vector))
                    builder.store(_load(builder, starts, place, types.float32, False, LANES), total)
            begins = [builder.gep(left, [builder.add(at, builder.mul(step, _offset(row)))]) for row in range(rows)]
            kind_of_right = ir.VectorType(INT32 if is_bf16 else FLOAT, LANES)
            with cgutils.for_range(builder, count) as loop:
                row_of_right = builder.gep(right, [builder.add(begin, builder.mul(loop.index, width))])
                factors = [
                    builder.load(
                        builder.bitcast(
                            builder.gep(row_of_right, [_offset(LANES * vector)]), kind_of_right.as_pointer()
                        ),
                        align=4,
                    )
                    for vector in range(vectors)
                ]
                for row_begin, totals in zip(begins, sums, strict=True):
                    number = _across_row(builder, row_begin, loop.index, is_bf16)
                    for total, factor in zip(totals, factors, strict=True):
                        builder.store(_multiplied(builder, builder.load(total), number, factor, is_bf16), total)
            least = _splat(builder, floor, LANES)
            for row, totals in enumerate(sums):
                place = builder.add(into, builder.mul(stride, _offset(row)))
                for vector, total in enumerate(totals):
                    numbers = builder.load(total)
                    is_less = builder.fcmp_ordered("<", numbers, least)  # not of NaN, which stays
                    target = builder.add(place, _offset(LANES * vector))
                    _store(builder, builder.select(is_less, least, numbers), out, target, types.float32, LANES)
            return context.get_dummy_value()

        place = types.uint64
        return types.void(
            a, place, place, b, place, place, place, start, place, place, types.float32, c, place, place
        ), generate

    return typed


def _store_pairs(builder: Any, low: Any, high: Any, target: Any, position: Any) -> None:
    pairs = builder.or_(low, builder.shl(high, _whole(INT32, LANES, 16)))
    place = builder.bitcast(builder.gep(target, [position]), ir.VectorType(INT32, LANES).as_pointer())
    builder.store(pairs, place, align=4)


def _lay_16(_: Any, source: Any, at: Any, step: Any, into: Any, position: Any) -> tuple[Signature, Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, target = (_data(context, builder, signature, arguments, k) for k in (0, 3))
        _, at, step, _, position = arguments
        if source.dtype == types.uint16:
            low, high = (
                builder.zext(
                    builder.load(
                        builder.bitcast(builder.gep(rows, [place]), ir.VectorType(INT16, LANES).as_pointer()), align=2
                    ),
                    ir.VectorType(INT32, LANES),
                )
                for place in (at, builder.add(at, step))
            )
            _store_pairs(builder, low, high, target, position)
            return context.get_dummy_value()
        first = _load(builder, rows, at, types.float32, False, LANES)
        if into.dtype == types.float32:
            _store(builder, first, target, position, types.float32, LANES)
            return context.get_dummy_value()
        second = _load(builder, rows, builder.add(at, step), types.float32, False, LANES)
        low, high = (_as_bf16_bits(builder, numbers, LANES) for numbers in (first, second))
        _store_pairs(builder, low, high, target, position)
        return context.get_dummy_value()

    place = types.uint64
    return types.void(source, place, place, into, place), generate


# product_RxV(a, at, step, b, begin, width, count, start, first, start_step, floor, c, into, stride): c[into + r stride:][:16 V] =
# start[first + r start_step:][:16 V] + the sum over k < count of a[at + r step:][k] b[begin + k width:][:16 V], for R rows r, in the
# order of k, and no less than `floor`. Of numbers in bf16, k counts pairs, in a as in b.
product_8x1, product_8x2 = _named("product_8x1", _make_product(8, 1)), _named("product_8x2", _make_product(8, 2))
# lay_16(source, at, step, into, position): into[position:][:16] = source[at:][:16], or in bf16 pairs of that and source[at + step:][:16]; source may be
# bf16 itself (uint16) where `into` holds pairs.
lay_16 = _named("lay_16", _lay_16)
