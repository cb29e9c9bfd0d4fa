"""Sum rows by their numbers within compiled functions, in registers: 64 columns at a time, then 32, 16 and single ones."""

from __future__ import annotations

import numpy as np

from pipeline.runtime.kernels.llvm_intrinsics import LANES, add_row_1, sum_rows_1, sum_rows_2, sum_rows_4
from pipeline.runtime.kernels.parts import part

U = np.uint64
L = U(LANES)


@part()
def sum_rows(table, begin, dim, order, factors, is_scaled, first, last, sums):  # type: ignore[no-untyped-def]
    """sums[:dim] = the sum over e in first..last of table[begin + order[e] * dim:][:dim], times factors[e] if is_scaled.

    In their order, in fp32; uint16 is fp16. Without is_scaled `factors` is any array of fp32, which is not read.
    """
    k = U(0)
    while k + U(4) * L <= dim:
        sum_rows_4(table, begin, dim, order, factors, is_scaled, first, last, k, sums)
        k += U(4) * L
    if k + U(2) * L <= dim:
        sum_rows_2(table, begin, dim, order, factors, is_scaled, first, last, k, sums)
        k += U(2) * L
    if k + L <= dim:
        sum_rows_1(table, begin, dim, order, factors, is_scaled, first, last, k, sums)
        k += L
    for number in range(k, dim):
        sums[number] = np.float32(0)
        for entry in range(first, last):
            factor = factors[entry] if is_scaled else np.float32(1)
            add_row_1(sums, number, table, begin + U(order[entry]) * dim + number, factor)
