"""Define LLVM intrinsics for the CPU kernels: sixteen numbers at a time, casts, prefetches.

Numba vectorizes only long loops, and an embedding's row is short. Arrays are flat. An array of
uint16 holds bf16 if it has gradients or pooled rows, and fp16 if it is a table.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.core.caching import NullCache
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from pipeline.runtime.logs import get_logger

LANES = 16
FLOAT, HALF, INT32, INT16 = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(16)


class _SayOnce(event.Listener):
    """Log once that kernels are being compiled, so that the first job of a new checkout is not silent."""

    said = False

    def on_start(self, event: event.Event) -> None:
        if not self.said and not isinstance(event.data["dispatcher"]._cache, NullCache):
            self.said = True
            get_logger(__name__).info(
                "compiling the CPU kernels that this job uses: a minute or two, once for this checkout and kind of CPU; "
                "`python -m pipeline precompile` compiles them ahead of a job"
            )

    def on_end(self, event: event.Event) -> None:
        pass


listener = _SayOnce()
event.register("numba:compile", listener)


def _across(kind: Any, lanes: int) -> Any:
    return ir.VectorType(kind, lanes) if lanes > 1 else kind


def _whole(kind: Any, lanes: int, value: int) -> Any:
    return ir.Constant(_across(kind, lanes), [value] * lanes if lanes > 1 else value)


def _data(context: Any, builder: Any, signature: Any, arguments: Any, position: int) -> Any:
    return context.make_array(signature.args[position])(context, builder, arguments[position]).data


def _pointer(builder: Any, data: Any, index: Any, kind: Any, lanes: int) -> Any:
    return builder.bitcast(builder.gep(data, [index]), _across(kind, lanes).as_pointer())


def _load(builder: Any, data: Any, index: Any, dtype: Any, is_table: bool, lanes: int) -> Any:
    """Load fp32, fp16 (a table) or bf16 as fp32."""
    if dtype == types.float32:
        return builder.load(_pointer(builder, data, index, FLOAT, lanes), align=4)
    bits = builder.load(_pointer(builder, data, index, INT16, lanes), align=2)
    if is_table:
        return builder.fpext(builder.bitcast(bits, _across(HALF, lanes)), _across(FLOAT, lanes))
    wide = builder.shl(builder.zext(bits, _across(INT32, lanes)), _whole(INT32, lanes, 16))
    return builder.bitcast(wide, _across(FLOAT, lanes))


def _store(builder: Any, numbers: Any, data: Any, index: Any, dtype: Any, lanes: int) -> None:
    """Store fp32 as fp32 or bf16. bf16 is rounded to the nearest number, ties to even; NaN stays NaN."""
    if dtype == types.float32:
        builder.store(numbers, _pointer(builder, data, index, FLOAT, lanes), align=4)
        return
    short = builder.trunc(_as_bf16_bits(builder, numbers, lanes), _across(INT16, lanes))
    builder.store(short, _pointer(builder, data, index, INT16, lanes), align=2)


def _as_bf16_bits(builder: Any, numbers: Any, lanes: int) -> Any:
    """Return the bits of fp32 rounded to bf16, in the lower half of 32 bits."""
    bits = builder.bitcast(numbers, _across(INT32, lanes))
    sixteen = _whole(INT32, lanes, 16)
    odd = builder.and_(builder.lshr(bits, sixteen), _whole(INT32, lanes, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _whole(INT32, lanes, 0x7FFF))), sixteen)
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    return builder.select(is_nan, _whole(INT32, lanes, 0x7FC0), rounded)


def _make_copy(lanes: int, is_table: bool = True) -> Any:
    def typed(_: Any, table: Any, at: Any, into: Any, position: Any) -> tuple[Signature, Any]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, target = (_data(context, builder, signature, arguments, position) for position in (0, 2))
            if table.dtype == into.dtype == types.uint16 and not is_table:
                bits = builder.load(_pointer(builder, source, arguments[1], INT16, lanes), align=2)
                builder.store(bits, _pointer(builder, target, arguments[3], INT16, lanes), align=2)
                return context.get_dummy_value()
            numbers = _load(builder, source, arguments[1], table.dtype, is_table, lanes)
            _store(builder, numbers, target, arguments[3], into.dtype, lanes)
            return context.get_dummy_value()

        return types.void(table, types.uint64, into, types.uint64), generate

    return typed


def _splat(builder: Any, number: Any, lanes: int) -> Any:
    if lanes == 1:
        return number
    nothing = ir.Constant(_across(FLOAT, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, number, INT32(0)), nothing, _whole(INT32, lanes, 0))


def _make_add(lanes: int, is_table: bool = False) -> Any:
    def typed(_: Any, into: Any, at: Any, source: Any, begin: Any, scale: Any) -> tuple[Signature, Any]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            sums, data = (_data(context, builder, signature, arguments, position) for position in (0, 2))
            factor = _splat(builder, arguments[4], lanes)
            numbers = _load(builder, data, arguments[3], source.dtype, is_table, lanes)
            before = _load(builder, sums, arguments[1], into.dtype, False, lanes)
            # "contract" lets the CPU round once.
            total = builder.fadd(before, builder.fmul(numbers, factor, flags=("contract",)), flags=("contract",))
            _store(builder, total, sums, arguments[1], into.dtype, lanes)
            return context.get_dummy_value()

        return types.void(into, types.uint64, source, types.uint64, types.float32), generate

    return typed


def _blend(builder: Any, before: Any, decay: Any, value: Any, share: Any) -> Any:
    """Compute decay * before + share * value. The result is rounded only twice if the CPU has fused multiply-add."""
    contract = ("contract",)
    return builder.fadd(
        builder.fmul(before, decay, flags=contract), builder.fmul(value, share, flags=contract), flags=contract
    )


def _root(builder: Any, numbers: Any, lanes: int) -> Any:
    # llvmlite names intrinsics of scalars only
    name = f"llvm.sqrt.v{lanes}f32" if lanes > 1 else "llvm.sqrt.f32"
    kind = ir.FunctionType(numbers.type, [numbers.type])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [numbers])


def _make_moment(lanes: int) -> Any:
    def typed(_: Any, moments: Any, at: Any, gradient: Any, k: Any, decay: Any, share: Any) -> tuple[Signature, Any]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            stored, fresh = (_data(context, builder, signature, arguments, position) for position in (0, 2))
            decay, share = (_splat(builder, number, lanes) for number in arguments[4:])
            numbers = _load(builder, fresh, arguments[3], types.float32, False, lanes)
            before = _load(builder, stored, arguments[1], types.float32, False, lanes)
            moment = _blend(builder, before, decay, numbers, share)
            _store(builder, moment, stored, arguments[1], types.float32, lanes)
            _store(builder, moment, fresh, arguments[3], types.float32, lanes)
            return context.get_dummy_value()

        return types.void(moments, types.uint64, gradient, types.uint64, types.float32, types.float32), generate

    return typed


def _make_adam(lanes: int) -> Any:
    def typed(  # twelve numbers, because an intrinsic takes no structure
        _: Any, moments: Any, squares: Any, at: Any, square_at: Any, gradient: Any, k: Any, decay: Any, share: Any,
        square_decay: Any, square_share: Any, square_scale: Any, eps: Any,
    ) -> tuple[Signature, Any]:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            means, spreads, fresh = (_data(context, builder, signature, arguments, position) for position in (0, 1, 4))
            decay, share, square_decay, square_share, scale, eps = (
                _splat(builder, number, lanes) for number in arguments[6:]
            )
            numbers = _load(builder, fresh, arguments[5], types.float32, False, lanes)
            mean = _load(builder, means, arguments[2], types.float32, False, lanes)
            spread = _load(builder, spreads, arguments[3], types.float32, False, lanes)
            mean = _blend(builder, mean, decay, numbers, share)
            spread = _blend(builder, spread, square_decay, builder.fmul(numbers, numbers), square_share)
            _store(builder, mean, means, arguments[2], types.float32, lanes)
            _store(builder, spread, spreads, arguments[3], types.float32, lanes)
            length = builder.fadd(_root(builder, builder.fmul(spread, scale), lanes), eps)
            _store(builder, builder.fdiv(mean, length), fresh, arguments[5], types.float32, lanes)
            return context.get_dummy_value()

        numbers = [types.float32] * 6
        return types.void(moments, squares, types.uint64, types.uint64, gradient, types.uint64, *numbers), generate

    return typed


def _make_multiply(rows: int, vectors: int) -> Any:
    """Make an intrinsic that keeps `rows` times `vectors` sums in registers and reads both factors once."""

    def typed(_: Any, a: Any, at: Any, step: Any, b: Any, begin: Any, width: Any, count: Any, c: Any, into: Any, stride: Any) -> tuple[Signature, Any]:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, right, out = (_data(context, builder, signature, arguments, position) for position in (0, 3, 7))
            _, at, step, _, begin, width, count, _, into, stride = arguments
            kind = _across(FLOAT, LANES)
            sums = [[cgutils.alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
            for each in (each for row in sums for each in row):
                builder.store(ir.Constant(kind, [0.0] * LANES), each)
            begins = [builder.gep(left, [builder.add(at, builder.mul(step, _offset(row)))]) for row in range(rows)]
            with cgutils.for_range(builder, count) as loop:
                first = builder.add(begin, builder.mul(loop.index, width))
                factors = [
                    _load(builder, right, builder.add(first, _offset(LANES * vector)), types.float32, False, LANES)
                    for vector in range(vectors)
                ]
                for row_begin, totals in zip(begins, sums, strict=True):
                    number = _splat(builder, _load(builder, row_begin, loop.index, types.float32, False, 1), LANES)
                    for total, factor in zip(totals, factors, strict=True):
                        product = builder.fmul(number, factor, flags=("contract",))
                        builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
            for row in range(rows):
                place = builder.add(into, builder.mul(stride, _offset(row)))
                for vector, total in enumerate(sums[row]):
                    target = builder.add(place, _offset(LANES * vector))
                    _store(builder, builder.load(total), out, target, types.float32, LANES)
            return context.get_dummy_value()

        place = types.uint64
        return types.void(a, place, place, b, place, place, place, c, place, place), generate

    return typed


def _make_sum(vectors: int) -> Any:
    """Make an intrinsic that keeps `vectors` sums in registers and reads rows in a loop, scaled or not."""

    def typed(_: Any, rows: Any, start: Any, dim: Any, order: Any, scales: Any, is_scaled: Any, first: Any, last: Any, k: Any, into: Any) -> tuple[Signature, Any]:  # fmt: skip
        def add_all(context: Any, builder: Any, signature: Any, arguments: Any, sums: Any, has_factors: bool) -> None:
            source, places, factors = (_data(context, builder, signature, arguments, at) for at in (0, 3, 4))
            _, start, dim, _, _, _, first, last, k, _ = arguments
            with cgutils.for_range(builder, builder.sub(last, first)) as loop:
                entry = builder.add(first, loop.index)
                row = builder.load(builder.gep(places, [entry]))
                row = row if row.type == first.type else builder.zext(row, first.type)
                begin = builder.add(builder.add(start, builder.mul(row, dim)), k)
                factor = _splat(builder, builder.load(builder.gep(factors, [entry])), LANES) if has_factors else None
                for vector, total in enumerate(sums):
                    place = builder.add(begin, _offset(LANES * vector))
                    numbers = _load(builder, source, place, rows.dtype, True, LANES)
                    if factor is not None:
                        numbers = builder.fmul(numbers, factor, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), numbers, flags=("contract",)), total)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            out, k = _data(context, builder, signature, arguments, 9), arguments[8]
            sums = [cgutils.alloca_once(builder, _across(FLOAT, LANES)) for _ in range(vectors)]
            for each in sums:
                builder.store(_whole(FLOAT, LANES, 0), each)
            with builder.if_else(arguments[5]) as (scaled, plain):
                with scaled:
                    add_all(context, builder, signature, arguments, sums, True)
                with plain:
                    add_all(context, builder, signature, arguments, sums, False)
            for vector, total in enumerate(sums):
                place = builder.add(k, _offset(LANES * vector))
                _store(builder, builder.load(total), out, place, types.float32, LANES)
            return context.get_dummy_value()

        place = types.uint64
        return types.void(rows, place, place, order, scales, types.boolean, place, place, place, into), generate

    return typed


def _transpose_16(_: Any, a: Any, at: Any, step: Any, b: Any, begin: Any, width: Any) -> tuple[Signature, Any]:
    """Transpose 16 x 16 numbers: pairs of rows exchange halves, quarters and so on, in 64 shuffles."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = (_data(context, builder, signature, arguments, position) for position in (0, 3))
        _, at, step, _, begin, width = arguments
        rows = []
        for row in range(LANES):
            place = builder.add(at, builder.mul(step, _offset(row)))
            rows.append(_load(builder, source, place, types.float32, False, LANES))
        for size in (1, 2, 4, 8):
            upper = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
            lower = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
            kind = ir.VectorType(INT32, LANES)
            for first in (row for row in range(LANES) if not row & size):
                pair = rows[first], rows[first + size]
                rows[first] = builder.shuffle_vector(*pair, ir.Constant(kind, upper))
                rows[first + size] = builder.shuffle_vector(*pair, ir.Constant(kind, lower))
        for row, numbers in enumerate(rows):
            place = builder.add(begin, builder.mul(width, _offset(row)))
            _store(builder, numbers, target, place, types.float32, LANES)
        return context.get_dummy_value()

    place = types.uint64
    return types.void(a, place, place, b, place, place), generate


def _offset(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _named(name: str, typed: Any) -> Any:
    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


# copy(table, at, into, position): into[position:][:lanes] = table[at:][:lanes], rounded to bf16 if
# `into` is bf16.
copy_16, copy_1 = _named("copy_16", _make_copy(LANES)), _named("copy_1", _make_copy(1))
# move(source, at, into, position): into[position:][:lanes] = source[at:][:lanes]. uint16 is bf16 on
# both sides.
move_16, move_1 = _named("move_16", _make_copy(LANES, False)), _named("move_1", _make_copy(1, False))
# multiply_RxV(a, at, step, b, begin, width, count, c, into, stride), for R rows r: c[into + r
# stride:][:16 V] = the sum over k < count of a[at + r step + k] b[begin + k width:][:16 V]. All
# numbers are fp32, added in the order of k.
multiply_8x1, multiply_8x2 = _named("multiply_8x1", _make_multiply(8, 1)), _named("multiply_8x2", _make_multiply(8, 2))
multiply_4x1, multiply_4x2 = _named("multiply_4x1", _make_multiply(4, 1)), _named("multiply_4x2", _make_multiply(4, 2))
# transpose_16(a, at, step, b, begin, width): b[begin + k width + r] = a[at + r step + k], for 16
# rows r and 16 columns k, fp32.
transpose_16 = _named("transpose_16", _transpose_16)
# sum_rows_V(rows, start, dim, order, scales, is_scaled, first, last, k, into): into[k:][:16 V] =
# the sum over e in first..last of rows[start + order[e] * dim + k:][:16 V], in the order of e, in
# fp32. Each row is multiplied by scales[e] if is_scaled. uint16 is fp16.
sum_rows_1, sum_rows_2, sum_rows_4 = (_named(f"sum_rows_{count}", _make_sum(count)) for count in (1, 2, 4))
# add(sums, at, gradients, begin, scale): sums[at:][:lanes] += scale * gradients[begin:][:lanes].
# `sums` is fp32.
add_16, add_1 = _named("add_16", _make_add(LANES)), _named("add_1", _make_add(1))
# The same for rows of a table: uint16 is fp16.
add_row_16, add_row_1 = _named("add_row_16", _make_add(LANES, True)), _named("add_row_1", _make_add(1, True))
# moment(moments, at, gradient, k, decay, share): moments[at:][:lanes] = decay * moments + share *
# gradient, and gradient[k:][:lanes] gets the same numbers.
moment_16, moment_1 = _named("moment_16", _make_moment(LANES)), _named("moment_1", _make_moment(1))
# adam(moments, squares, at, square_at, gradient, k, decay, share, square_decay, square_share,
# square_scale, eps): update both moments, then gradient[k:][:lanes] = moments / (sqrt(squares *
# square_scale) + eps).
adam_16, adam_1 = _named("adam_16", _make_adam(LANES)), _named("adam_1", _make_adam(1))


def _cast(name: str, from_type: Any, to_type: Any, steps: list[tuple[str, Any]]) -> Any:
    """Make an intrinsic for one number that applies LLVM's casts in their order."""

    def typed(_: Any, value: Any) -> tuple[Signature, Any]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            result = arguments[0]
            for instruction, to in steps:
                result = getattr(builder, instruction)(result, to)
            return result

        return to_type(from_type), generate

    return _named(name, typed)


bits = _cast("bits", types.float32, types.uint32, [("bitcast", INT32)])
from_bits = _cast("from_bits", types.uint32, types.float32, [("bitcast", FLOAT)])
widen = _cast("widen", types.uint16, types.float32, [("bitcast", HALF), ("fpext", FLOAT)])
narrow = _cast("narrow", types.float32, types.uint16, [("fptrunc", HALF), ("bitcast", INT16)])


def _make_prefetch(to_write: int) -> Any:
    def typed(_: Any, array: Any, index: Any) -> tuple[Signature, Any]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = _data(context, builder, signature, arguments, 0)
            line = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
            kind = ir.FunctionType(ir.VoidType(), [line.type, INT32, INT32, INT32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
            # locality: keep; cache type: data
            builder.call(function, [line, INT32(to_write), INT32(3), INT32(1)])
            return context.get_dummy_value()

        return types.void(array, index), generate

    return typed


# prefetch(array, index): load the cache line of array[index], to read it or to write it.
prefetch_to_read = _named("prefetch_to_read", _make_prefetch(0))
prefetch_to_write = _named("prefetch_to_write", _make_prefetch(1))
