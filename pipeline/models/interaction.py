"""Turn pooled embeddings and the dense arch's output into DLRM's pairwise dot products (arXiv 1906.00091, section 2.1.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.threads import thread_pool

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
WIDEST_FOR_KERNELS = 32  # numbers a row: wider ones are as quick by torch's product
LEAST_SHARE = 256  # samples: fewer are not worth a thread


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
        self.num_sparse_features = num_sparse_features

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        device_type = dense.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dense.dtype
        return _Dots.apply(dense, rows, dtype)  # type: ignore[no-any-return,no-untyped-call]


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        ctx.dtypes = dense.dtype, rows.dtype
        ctx.kernels = _kernels() if _fits_kernels(rows, dtype) else None
        if ctx.kernels is not None:
            exact = dense.float()
            ctx.save_for_backward(exact, rows)
            return _by_kernel(ctx.kernels[0], exact, rows, dtype)
        combined = torch.cat([dense.to(dtype).unsqueeze(1), rows.to(dtype)], dim=1)
        ctx.save_for_backward(combined)
        products = torch.bmm(combined, combined.transpose(1, 2))
        num_rows = combined.shape[1]
        return torch.cat([combined[:, 0], *(products[:, row, row + 1 :] for row in range(num_rows - 1))], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        if ctx.kernels:
            exact, rows = ctx.saved_tensors
            to_dense, to_rows = _back_by_kernel(ctx.kernels[1], exact, rows, gradient)
            return to_dense.to(ctx.dtypes[0]), to_rows, None
        (combined,) = ctx.saved_tensors
        both = torch.bmm(symmetric(gradient, combined), combined)
        first = both[:, 0] + gradient[:, : combined.shape[2]]
        return first.to(ctx.dtypes[0]), both[:, 1:].to(ctx.dtypes[1]), None


def symmetric(gradient: torch.Tensor, combined: torch.Tensor) -> torch.Tensor:
    """[B, D + P] -> G + G^T [B, n, n], where the upper triangle of G holds the last P columns, row by row."""
    batch, num_rows, dim = combined.shape
    products = combined.new_zeros(batch, num_rows, num_rows)
    first, second = torch.triu_indices(num_rows, num_rows, offset=1, device=combined.device)
    products[:, first, second] = products[:, second, first] = gradient[:, dim:]
    return products


def _fits_kernels(rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Not while torch.export or torch.compile traces: numpy sees no tensors there."""
    if torch.compiler.is_compiling() or type(rows) is not torch.Tensor:
        return False
    is_narrow = rows.shape[2] <= WIDEST_FOR_KERNELS
    return is_narrow and rows.device.type == "cpu" and rows.dtype == torch.float32 and dtype in KERNEL_DTYPES


@cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None]] | None:
    try:
        from pipeline.models.dots_kernels import dots_backward, dots_forward
    except ImportError:
        return None
    return dots_forward, dots_backward


def _by_kernel(
    kernel: Callable[..., None], dense: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    batch, num_rows, dim = len(rows), rows.shape[1] + 1, rows.shape[2]
    out = dense.new_empty(batch, dim + num_rows * (num_rows - 1) // 2, dtype=dtype)
    inputs = _flat(dense), _flat(rows), np.uint64(num_rows), np.uint64(dim)
    _on_all_threads(batch, lambda begin, end: kernel(*inputs, *_full_or_half(out), begin, end))
    return out


def _back_by_kernel(
    kernel: Callable[..., None], dense: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_rows, dim = len(rows), rows.shape[1] + 1, rows.shape[2]
    to_dense, to_rows = torch.empty_like(dense), torch.empty_like(rows, memory_format=torch.contiguous_format)
    inputs = _flat(dense), _flat(rows), *_full_or_half(gradient), np.uint64(num_rows), np.uint64(dim)
    outputs = _flat(to_dense), _flat(to_rows)
    _on_all_threads(batch, lambda begin, end: kernel(*inputs, *outputs, begin, end))
    return to_dense, to_rows


def _flat(values: torch.Tensor) -> np.ndarray[Any, Any]:
    return values.detach().contiguous().numpy().reshape(-1)


def _full_or_half(values: torch.Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], bool]:
    """(fp32, bf16 as uint16, which of them): the other one is empty."""
    if values.dtype == torch.bfloat16:
        return np.empty(0, np.float32), _flat(values.view(torch.uint16)), True
    return _flat(values), np.empty(0, np.uint16), False


def _on_all_threads(batch: int, work: Callable[[np.uint64, np.uint64], None]) -> None:
    """work(begin, end) on shares of the samples; each sample is computed by itself, so their number changes no result."""
    shares = min(torch.get_num_threads(), max(batch // LEAST_SHARE, 1))
    bounds = [np.uint64(batch * share // shares) for share in range(shares + 1)]
    later = [thread_pool(shares).submit(work, *bound) for bound in pairwise(bounds[1:])]
    work(bounds[0], bounds[1])
    for result in later:
        result.result()
