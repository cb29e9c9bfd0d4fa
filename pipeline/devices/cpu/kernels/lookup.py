"""Look up and pool rows on the CPU by kernels that Numba compiles.

FBGEMM checks the ids in a separate pass and returns fp32, which a bf16 model casts in another pass.
Here one pass checks, pools and rounds. Rows are summed in fp32, in the order of the bag's ids.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.devices.cpu.kernels.llvm_intrinsics import LANES, add_row_1, add_row_16, copy_1, copy_16, prefetch_to_read
from pipeline.devices.cpu.kernels.parts import part, sum_rows

U = np.uint64
AHEAD = 8  # ids
# samples whose pooled rows stay in the second-level cache until the last feature is done
BLOCK = 32


@part()
def _copy(table, at, into, position, dim):  # type: ignore[no-untyped-def]
    whole = dim // U(LANES) * U(LANES)
    for k in range(U(0), whole, U(LANES)):
        copy_16(table, at + k, into, position + k)
    for k in range(whole, dim):
        copy_1(table, at + k, into, position + k)


@part()
def _prefetch(table, begin, indices, position, limit, dim):  # type: ignore[no-untyped-def]
    """Prefetch the row of an id. The id is not checked yet."""
    if position < U(len(indices)):
        at = begin + min(U(indices[position]), limit) * dim
        for k in range(U(0), dim, U(LANES)):
            prefetch_to_read(table, at + k)


@part()
def _sum_scaled(table, begin, indices, factors, first, last, scale, dim, sums):  # type: ignore[no-untyped-def]
    """Set sums[:dim] = scale * the sum of the rows of indices[first:last], times their factors."""
    sums[:dim] = np.float32(0)
    whole = dim // U(LANES) * U(LANES)
    for position in range(first, last):
        share = scale
        if len(factors):
            share = scale * factors[position]
        at = begin + U(indices[position]) * dim
        for k in range(U(0), whole, U(LANES)):
            add_row_16(sums, k, table, at + k, share)
        for k in range(whole, dim):
            add_row_1(sums, k, table, at + k, share)


# Plain arrays and numbers, because Numba cannot compile a record that bundles them.
@njit(nogil=True, cache=True)
def look_up(  # type: ignore[no-untyped-def]
    indices, offsets, factors, num_samples, columns, table, table_begins, num_rows, is_mean, out, width, begin, end
):  # fmt: skip
    """Fill out[s * width + columns[f]:] with the pooled rows of each feature f, for samples s in
    begin..end.

    indices [L], offsets [F * B + 1], columns [F + 1]. factors: the ids' weights [L], or an empty
    array [0]. Means are divided by the number of ids. table: all rows, 1-D; those of feature f
    begin at table_begins[f], and there are num_rows[f]. Returns False if an id or an offset is out
    of range.
    """
    num_features = U(len(columns) - 1)
    widest = U(0)
    for feature in range(num_features):
        widest = max(widest, U(columns[feature + U(1)] - columns[feature]))
    sums = np.empty(widest + U(LANES), np.float32)
    for block in range(begin, end, U(BLOCK)):
        last_sample = min(block + U(BLOCK), end)
        for feature in range(num_features):
            dim = U(columns[feature + U(1)] - columns[feature])
            table_begin, limit = U(table_begins[feature]), U(num_rows[feature])
            for sample in range(block, last_sample):
                bag = feature * num_samples + sample
                first, last = U(offsets[bag]), U(offsets[bag + U(1)])
                if first > last or last > U(len(indices)):
                    return False
                for position in range(first, last):
                    if U(indices[position]) >= limit:  # a negative id becomes a large one
                        return False
                    # The id of the next bag if bags are short.
                    _prefetch(table, table_begin, indices, position + U(AHEAD), limit, dim)
                target = sample * width + U(columns[feature])
                if last - first == U(1) and not len(factors):
                    _copy(table, table_begin + U(indices[first]) * dim, out, target, dim)
                    continue
                if len(factors) or is_mean:
                    scale = np.float32(1)
                    if is_mean and last > first:
                        scale = np.float32(1) / np.float32(last - first)
                    _sum_scaled(table, table_begin, indices, factors, first, last, scale, dim, sums)
                else:
                    sum_rows(table, table_begin, dim, indices, sums, False, first, last, sums)
                _copy(sums, U(0), out, target, dim)
    return True
