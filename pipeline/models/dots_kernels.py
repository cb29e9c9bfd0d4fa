"""Turn the gradients of pairs into symmetric matrices, compiled by Numba: numbers are moved, not looked at.

torch does it by 26 slices and a transposed sum, or by an index that is slow on bf16. Indexes are unsigned: Numba then
leaves out its check for negative ones.
"""

from __future__ import annotations

from numba import njit, uint64


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def spread_pairs(rows, width, dim, order, num_rows, products, begin, end):  # type: ignore[no-untyped-def]
    """rows [B * width] -> products [B * n * n], for samples begin..end: number i of a sample's n * n comes from the pair
    order[i], which stands at dim + order[i] of its row; the diagonal is 0."""
    size = num_rows * num_rows
    for sample in range(begin, end):
        row, at = sample * width + dim, sample * size
        for i in range(size):
            products[at + uint64(i)] = rows[row + order[i]]
        for i in range(uint64(0), size, num_rows + uint64(1)):
            products[at + i] = 0
