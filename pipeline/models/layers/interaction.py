"""Compute DLRM's pairwise dot products of pooled embeddings and the dense arch's output (arXiv 1906.00091, 2.1.3)."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.devices.base import autocast_dtype, in_host_memory
from pipeline.devices.cpu.products import dots, dots_backward, multiplies_rows


class PooledRows(nn.Module):
    """Map a KeyedTensor to [batch, F, D] in the order of `feature_names` under any plan."""

    def __init__(self, feature_names: list[str]) -> None:
        super().__init__()
        self.feature_names = feature_names
        self._orders: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor] | None] = {}

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        values = pooled.values()
        rows = values.view(values.shape[0], len(self.feature_names), -1)
        keys = tuple(pooled.keys())
        if keys not in self._orders:
            order = [keys.index(name) for name in self.feature_names]
            is_same = order == list(range(len(order)))
            both_ways = [order, [self.feature_names.index(name) for name in keys]]
            there, back = (torch.tensor(each, device=values.device) for each in both_ways)
            self._orders[keys] = None if is_same else (there, back)
        order_here = self._orders[keys]
        return rows if order_here is None else _Reordered.apply(rows, *order_here)


class _Reordered(torch.autograd.Function):
    """Permute dimension 1. Backward is a permutation too, where torch would add to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(1, there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(1, back), None, None


class DotInteraction(nn.Module):
    """Map dense [B, D] and rows [B, F, D] to [B, D + F + F (F - 1) / 2]: dense, then the pairs' dot
    products.

    Numbers and order are those of torchrec.models.dlrm.InteractionArch. X X^T is symmetric, so
    backward needs only one product (G + G^T) X; autograd computes two. If dense is None, the output
    is only the pairs [B, F (F - 1) / 2].
    """

    def __init__(self, num_sparse_features: int, has_dense: bool = True) -> None:
        super().__init__()
        self.num_sparse_features, self.has_dense = num_sparse_features, has_dense
        # without the products with dense
        self.out_features = num_sparse_features * (num_sparse_features - 1) // 2
        # True: memory is reserved for `dense` before each sample's rows
        self.rows_are_padded = False
        self.uses_kernel = True
        self._positions: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, dense: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        dtype = autocast_dtype(rows) or (rows.dtype if dense is None else dense.dtype)
        by_kernel = self.uses_kernel and multiplies_rows(rows, dtype)
        positions = None if by_kernel else self._positions_on(rows.device, rows.shape[1] + (dense is not None))
        return _Dots.apply(dense, rows, dtype, self.rows_are_padded, positions)

    def _positions_on(self, device: torch.device, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pairs' positions in a flat [n, n], and for each of its numbers the position in
        (pairs, 0).

        torch then gathers in one call; slices would need a call for each row.
        """
        if torch.compiler.is_compiling():  # tensors made during tracing are not kept
            return _positions(device, num_rows)
        if device not in self._positions:
            self._positions[device] = _positions(device, num_rows)
        return self._positions[device]


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dense: torch.Tensor | None,
        rows: torch.Tensor,
        dtype: torch.dtype,
        rows_are_padded: bool,
        positions: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """positions: from _positions_on, or None if the CPU's kernel multiplies."""
        ctx.dtypes = None if dense is None else dense.dtype, rows.dtype
        combined = _in_place(dense, rows, dtype) if dense is not None and rows_are_padded else None
        if combined is None:
            combined = _combined(dense, rows, dtype)
        ctx.save_for_backward(combined, *(positions or ())[1:])
        if positions is None:
            return dots(combined, 0 if dense is None else combined.shape[2])
        products = torch.bmm(combined, combined.transpose(1, 2))
        first = [] if dense is None else [combined[:, 0]]
        return torch.cat([*first, products.flatten(1).index_select(1, positions[0])], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None, None]:
        combined, *both_ways = ctx.saved_tensors
        num_rows, dim = combined.shape[1:]
        to_dense, to_rows_type = ctx.dtypes
        lead = 0 if to_dense is None else dim
        if not both_ways:
            both = dots_backward(gradient, combined, lead)
            return _split(both, None if to_dense is None else both[:, 0], to_dense, to_rows_type)
        both = torch.bmm(_symmetric(gradient[:, lead:], both_ways[0], num_rows), combined)
        first = None if to_dense is None else both[:, 0] + gradient[:, :dim]
        return _split(both, first, to_dense, to_rows_type)


def _split(
    both: torch.Tensor, first: torch.Tensor | None, to_dense: torch.dtype | None, to_rows_type: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor, None, None, None]:
    """Return the gradients of dense (None without `first`) and of rows from their common gradient [B, F (+ 1), D]."""
    to_rows = both if first is None else both[:, 1:]
    if to_rows.dtype != to_rows_type:
        to_rows = to_rows.to(to_rows_type, memory_format=torch.contiguous_format)
    return None if first is None else first.to(to_dense), to_rows, None, None, None


def _in_place(dense: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Write `dense` into memory reserved before `rows`. Return [B, F + 1, D], or None if no memory is reserved."""
    batch, num_features, dim = rows.shape
    strides, count = ((num_features + 1) * dim, dim, 1), batch * (num_features + 1) * dim
    is_slice = rows.stride() == strides and rows.storage_offset() == dim
    if not is_slice or rows.dtype != dtype or rows.untyped_storage().nbytes() != count * rows.element_size():
        return None
    # A view of rows.data, because autograd would notice a change of the memory of `rows`.
    combined = rows.data.as_strided((batch, num_features + 1, dim), strides, 0)
    combined[:, 0] = dense
    return combined


def _combined(dense: torch.Tensor | None, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Join [B, D] and [B, F, D] to [B, F + 1, D] of `dtype`. Return the rows if there are no dense features."""
    if dense is None:
        return rows.to(dtype).contiguous()
    if torch.compiler.is_compiling() or not in_host_memory(dense):
        return torch.cat([dense.to(dtype).unsqueeze(1), rows.to(dtype)], dim=1)
    combined = dense.new_empty(len(dense), rows.shape[1] + 1, rows.shape[2], dtype=dtype)
    combined[:, 0], combined[:, 1:] = dense, rows
    return combined


def _symmetric(gradient: torch.Tensor, both_ways: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return G + G^T [B, n, n]. The gradient [B, P] holds the upper triangle of G row by row."""
    with_zero = torch.nn.functional.pad(gradient, (0, 1))
    return with_zero.index_select(1, both_ways).view(len(gradient), num_rows, num_rows)


def _positions(device: torch.device, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = list(combinations(range(num_rows), 2))
    both_ways = [len(pairs)] * num_rows**2  # the diagonal: index of the zero after the pairs
    for number, (i, j) in enumerate(pairs):
        both_ways[i * num_rows + j] = both_ways[j * num_rows + i] = number
    above = [i * num_rows + j for i, j in pairs]
    return torch.tensor(above, device=device), torch.tensor(both_ways, device=device)
