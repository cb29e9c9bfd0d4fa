"""Step Adam over many weights whose gradients are bf16, and write each weight in bf16 as well: one pass, compiled by Numba.

torch's fused step takes gradients of the weights' own type. Between it and products in bf16 stand two casts, of each gradient
and of each weight, and for wide layers these are passes over memory like the step itself.

The arithmetic is that of torch's fused Adam and AdamW on CPUs, operation by operation, so a weight and its moments have the
same bits (aten/src/ATen/native/cpu/FusedAdamKernel.cpp, where beta1 is above 0.5). Where torch's vectors are of sixteen, up
to eight of a weight's last fifteen numbers may differ in the last digit of their second moment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from pipeline.devices.cpu.kernels.llvm_intrinsics import (
    FLOAT,
    INT16,
    INT32,
    LANES,
    _across,
    _as_bf16_bits,
    _root,
    _splat,
    _whole,
)

U = np.uint64
L = U(LANES)
# Places in the array of a step's numbers: what a gradient's share of the first moment is; the second one's decay and a
# square's share of it; the root of its bias correction; eps; the step's size; what weight decay adds to a gradient, a
# number of the weight; what AdamW keeps of a weight.
SHARE, SQUARE_DECAY, SQUARE_SHARE, ROOT, EPS, SIZE, L2, KEEP = range(8)
WEIGHT, GRADIENT, MEAN, SPREAD, COPY = range(5)  # columns of the addresses


def _fma(builder: Any, a: Any, b: Any, c: Any, lanes: int) -> Any:
    name = f"llvm.fma.v{lanes}f32" if lanes > 1 else "llvm.fma.f32"
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [a, b, c])


def _make_step(lanes: int) -> Any:
    """step(weight, gradient, mean, spread, copy: addresses; the eight numbers): `lanes` numbers from each address on."""

    def typed(_: Any, weight: Any, gradient: Any, mean: Any, spread: Any, copy: Any, share: Any, square_decay: Any, square_share: Any, correction: Any, eps: Any, size: Any, l2: Any, keep: Any) -> tuple[Signature, Any]:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            floats, halves = _across(FLOAT, lanes), _across(INT16, lanes)
            kinds = (floats, halves, floats, floats, halves)
            places = [builder.inttoptr(at, kind.as_pointer()) for at, kind in zip(arguments[:5], kinds, strict=True)]
            share, square_decay, square_share, correction, eps, size, l2, keep = (
                _splat(builder, number, lanes) for number in arguments[5:]
            )
            weight, mean, spread = (builder.load(places[k], align=4) for k in (WEIGHT, MEAN, SPREAD))
            short = builder.zext(builder.load(places[GRADIENT], align=2), _across(INT32, lanes))
            gradient = builder.bitcast(builder.shl(short, _whole(INT32, lanes, 16)), floats)
            gradient = _fma(builder, weight, l2, gradient, lanes)
            weight = builder.fmul(weight, keep)
            mean = _fma(builder, share, builder.fsub(gradient, mean), mean, lanes)
            square = builder.fmul(square_share, gradient)
            if lanes > 1:
                spread = _fma(builder, square, gradient, builder.fmul(square_decay, spread), lanes)
            else:  # torch's compiler joins the other two, in what it does number by number
                spread = _fma(builder, square_decay, spread, builder.fmul(square, gradient), lanes)
            length = builder.fadd(builder.fdiv(_root(builder, spread, lanes), correction), eps)
            weight = builder.fsub(weight, builder.fdiv(builder.fmul(size, mean), length))
            for number, place in ((weight, WEIGHT), (mean, MEAN), (spread, SPREAD)):
                builder.store(number, places[place], align=4)
            builder.store(builder.trunc(_as_bf16_bits(builder, weight, lanes), halves), places[COPY], align=2)
            return context.get_dummy_value()

        return types.void(*[types.uint64] * 5, *[types.float32] * 8), generate

    typed.__name__ = typed.__qualname__ = f"step_{lanes}"
    return intrinsic(typed)


_step_16, _step_8, _step_1 = _make_step(LANES), _make_step(8), _make_step(1)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def step_weights(blocks, addresses, numbers, begin, end):  # type: ignore[no-untyped-def]
    """For the blocks begin..end, [n, 3] of a weight, its first number and how many they are.

    addresses [weights, 5]: of the weight, fp32; its gradient, bf16; its two moments, fp32; and its copy, bf16; all contiguous.
    numbers [weights, 8], fp32: as above.
    """
    for block in range(begin, end):
        weight, first, count = U(blocks[block, 0]), U(blocks[block, 1]), U(blocks[block, 2])
        own = numbers[weight]
        share, square_decay, square_share = own[SHARE], own[SQUARE_DECAY], own[SQUARE_SHARE]
        correction, eps, size, l2, keep = own[ROOT], own[EPS], own[SIZE], own[L2], own[KEEP]
        wide, short = U(4) * first, U(2) * first
        w, g = addresses[weight, WEIGHT] + wide, addresses[weight, GRADIENT] + short
        m, v = addresses[weight, MEAN] + wide, addresses[weight, SPREAD] + wide
        c, even = addresses[weight, COPY] + short, count // L * L
        for k in range(U(0), even, L):
            _step_16(
                w + U(4) * k, g + U(2) * k, m + U(4) * k, v + U(4) * k, c + U(2) * k,
                share, square_decay, square_share, correction, eps, size, l2, keep,
            )  # fmt: skip
        if count - even >= U(8):  # as torch, whose vectors are of eight on most CPUs
            k = even
            _step_8(
                w + U(4) * k, g + U(2) * k, m + U(4) * k, v + U(4) * k, c + U(2) * k,
                share, square_decay, square_share, correction, eps, size, l2, keep,
            )  # fmt: skip
            even += U(8)
        for k in range(even, count):
            _step_1(
                w + U(4) * k, g + U(2) * k, m + U(4) * k, v + U(4) * k, c + U(2) * k,
                share, square_decay, square_share, correction, eps, size, l2, keep,
            )  # fmt: skip
