"""Copy runs of numbers within compiled functions, sixteen at a time, between arrays of either type."""

from __future__ import annotations

import numpy as np

from pipeline.runtime.kernels.llvm_intrinsics import LANES, move_1, move_16
from pipeline.runtime.kernels.parts import part

U = np.uint64
L = U(LANES)


@part()
def move(source, at, into, position, count):  # type: ignore[no-untyped-def]
    """into[position : position + count] = source[at : at + count], rounded to `into`'s type."""
    if count < L:
        for k in range(count):
            move_1(source, at + k, into, position + k)
        return
    for k in range(U(0), count - L, L):
        move_16(source, at + k, into, position + k)
    move_16(source, at + count - L, into, position + count - L)  # over what the one before has moved, in part
