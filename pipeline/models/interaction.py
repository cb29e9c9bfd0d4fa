"""Turn pooled embeddings and the dense arch's output into DLRM's pairwise dot products (arXiv 1906.00091, section 2.1.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor


class PooledRows(nn.Module):
    """KeyedTensor -> [batch, F, D] in the order of `feature_names`, whatever order the plan has left its columns in."""

    def __init__(self, feature_names: list[str]) -> None:
        super().__init__()
        self.feature_names = feature_names
        self._orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        values = pooled.values()
        rows = values.view(values.shape[0], len(self.feature_names), -1)
        keys = tuple(pooled.keys())
        if keys not in self._orders:
            order = torch.tensor([keys.index(name) for name in self.feature_names])
            is_same = bool((order == torch.arange(len(order))).all())
            self._orders[keys] = None if is_same else order.to(values.device)
        order_here = self._orders[keys]
        return rows if order_here is None else _Reordered.apply(rows, order_here)  # type: ignore[no-untyped-call]


class _Reordered(torch.autograd.Function):
    """index_select along dimension 1 by a permutation: its backward is one too, where torch's adds up from zeros."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(order)
        return rows.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return gradient.index_select(1, torch.argsort(order)), None


class DotInteraction(nn.Module):
    """dense [B, D], rows [B, F, D] -> [B, D + F + F (F - 1) / 2]: dense, then the dot product of every pair.

    The same numbers in the same order as torchrec.models.dlrm.InteractionArch. The products' matrix X X^T is symmetric,
    so backward is one product (G + G^T) X where autograd's of the bmm takes two, and neither way is an index scattered.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self._num_rows = num_sparse_features + 1

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        device_type = dense.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dense.dtype
        return _Dots.apply(dense, rows, dtype)  # type: ignore[no-any-return,no-untyped-call]


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        batch, num_rows, dim = len(dense), rows.shape[1] + 1, dense.shape[1]
        combined = dense.new_empty(batch, num_rows, dim, dtype=dtype)
        combined[:, 0] = dense
        combined[:, 1:] = rows
        ctx.save_for_backward(combined)
        ctx.dtypes = dense.dtype, rows.dtype
        products = torch.bmm(combined, combined.transpose(1, 2))
        return torch.cat([combined[:, 0], *(products[:, row, row + 1 :] for row in range(num_rows - 1))], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        (combined,) = ctx.saved_tensors
        batch, num_rows, dim = combined.shape
        products = combined.new_zeros(batch, num_rows, num_rows)
        at = dim
        for row in range(num_rows - 1):
            width = num_rows - 1 - row
            products[:, row, row + 1 :] = gradient[:, at : at + width]
            at += width
        both = torch.bmm(products + products.transpose(1, 2), combined)
        dense = both[:, 0] + gradient[:, :dim]
        return dense.to(ctx.dtypes[0]), both[:, 1:].to(ctx.dtypes[1]), None
