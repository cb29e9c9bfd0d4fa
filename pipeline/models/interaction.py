"""Turn pooled embeddings and the dense arch's output into DLRM's pairwise dot products (arXiv 1906.00091, section 2.1.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

# Moving numbers needs their size alone, and Numba has no bf16.
SAME_SIZE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


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
        batch, num_rows, dim = (
            dense.shape[0],
            rows.shape[1] + 1,
            dense.shape[1],
        )  # len() would pin the batch in torch.export
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
        both = torch.bmm(symmetric(gradient, combined), combined)
        dense = both[:, 0] + gradient[:, : combined.shape[2]]
        return dense.to(ctx.dtypes[0]), both[:, 1:].to(ctx.dtypes[1]), None


def symmetric(gradient: torch.Tensor, combined: torch.Tensor) -> torch.Tensor:
    """[B, D + P] -> G + G^T [B, n, n], where the upper triangle of G holds the last P columns, row by row."""
    batch, num_rows, dim = combined.shape
    if gradient.device.type == "cpu" and (kernel := _spread_pairs()) and gradient.dtype in SAME_SIZE:
        products = combined.new_empty(batch, num_rows, num_rows)
        numbers = SAME_SIZE[gradient.dtype]
        kernel(
            gradient.contiguous().view(numbers).numpy().reshape(-1), np.uint64(gradient.shape[1]), np.uint64(dim),
            _order(num_rows), np.uint64(num_rows), products.view(numbers).numpy().reshape(-1), np.uint64(0),
            np.uint64(batch),
        )  # fmt: skip
        return products
    products = combined.new_zeros(batch, num_rows, num_rows)
    first, second = torch.triu_indices(num_rows, num_rows, offset=1, device=combined.device)
    products[:, first, second] = products[:, second, first] = gradient[:, dim:]
    return products


@cache
def _spread_pairs() -> Callable[..., None] | None:
    try:
        from pipeline.models.dots_kernels import spread_pairs
    except ImportError:
        return None
    kernel: Callable[..., None] = spread_pairs
    return kernel


@cache
def _order(num_rows: int) -> np.ndarray[Any, Any]:
    """Of each number of an n x n matrix, row by row, which pair it is; 0 on the diagonal."""
    order = np.zeros((num_rows, num_rows), dtype=np.uint64)
    first, second = np.triu_indices(num_rows, 1)
    order[first, second] = order[second, first] = np.arange(len(first))
    return order.reshape(-1)
