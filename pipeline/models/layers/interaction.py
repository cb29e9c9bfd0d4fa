"""Compute DLRM's pairwise dot products of pooled embeddings and the dense arch's output (arXiv 1906.00091, 2.1.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.devices.base import autocast_dtype, in_host_memory
from pipeline.devices.cpu.kernel_pool import can_read, is_recorded, kernels, on_all_threads, record

AS_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}  # what the kernel moves
WIDEST_BF16 = 16  # columns of rows whose products in bf16 are computed in fp32; those of wider ones in pairs
NOWHERE = np.empty(0, np.uint64)


class PooledRows(nn.Module):
    """KeyedTensor -> [batch, F, D] in the order of `feature_names`, whatever order the plan has left its columns in."""

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
        return rows if order_here is None else _Reordered.apply(rows, *order_here)  # type: ignore[no-untyped-call]


class _Reordered(torch.autograd.Function):
    """index_select along dimension 1 by a permutation: its backward is one too, where torch's adds up from zeros."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, there: torch.Tensor, back: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(1, there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return gradient.index_select(1, back), None, None


class DotInteraction(nn.Module):
    """dense [B, D], rows [B, F, D] -> [B, D + F + F (F - 1) / 2]: dense, then the dot product of every pair.

    The same numbers in the same order as torchrec.models.dlrm.InteractionArch. The products' matrix X X^T is symmetric,
    so backward is one product (G + G^T) X where autograd's of the bmm takes two, and neither way is an index scattered.
    Without dense features dense is None, and what is left are the products of the rows [B, F (F - 1) / 2].
    """

    def __init__(self, num_sparse_features: int, has_dense: bool = True) -> None:
        super().__init__()
        self.num_sparse_features, self.has_dense = num_sparse_features, has_dense
        self.out_features = num_sparse_features * (num_sparse_features - 1) // 2  # beside those of dense
        self.rows_have_room = False  # for `dense` ahead of each sample's rows, in one block of memory
        self.uses_kernel = True
        self._positions: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, dense: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        dtype = autocast_dtype(rows) or (rows.dtype if dense is None else dense.dtype)
        by_kernel = self.uses_kernel and _fits_kernel(rows, dtype) and _kernel() is not None
        positions = None if by_kernel else self._positions_on(rows.device, rows.shape[1] + (dense is not None))
        return _Dots.apply(dense, rows, dtype, self.rows_have_room, positions)  # type: ignore[no-any-return,no-untyped-call]

    def _positions_on(self, device: torch.device, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the pairs lie in a flat [n, n], and where each of a flat [n, n] lies in the pairs and a zero.

        By them torch gathers the pairs in one call, where slices of rows are a call of the host each.
        """
        if torch.compiler.is_compiling():  # what is traced is not kept
            return _positions(device, num_rows)
        if device not in self._positions:
            self._positions[device] = _positions(device, num_rows)
        return self._positions[device]


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        dense: torch.Tensor | None,
        rows: torch.Tensor,
        dtype: torch.dtype,
        rows_have_room: bool,
        positions: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """positions: None where our kernels take the pairs."""
        ctx.dtypes = None if dense is None else dense.dtype, rows.dtype
        ctx.take = _kernel() if positions is None else None
        ctx.by_kernel = ctx.take is not None and _suits_kernel(rows, dtype)
        combined = _in_place(dense, rows, dtype) if dense is not None and rows_have_room else None
        if combined is None:
            combined = _combined(dense, rows, dtype)
        ctx.save_for_backward(combined, *(positions or ())[1:])
        if ctx.by_kernel:
            return _dots(combined, 0 if dense is None else combined.shape[2])
        products = torch.bmm(combined, combined.transpose(1, 2))
        num_rows, dim = combined.shape[1:]
        first = [] if dense is None else [combined[:, 0]]
        if positions is not None:
            return torch.cat([*first, products.flatten(1).index_select(1, positions[0])], dim=1)
        pairs, lead = _pairs(num_rows), len(first) * dim
        out = combined.new_empty(len(combined), lead + len(pairs))
        if first:
            out[:, :lead] = combined[:, 0]
        _take(ctx.take, products.flatten(1), pairs, out, lead)
        return out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, None, None, None]:
        combined, *positions = ctx.saved_tensors
        num_rows, dim = combined.shape[1:]
        to_dense, to_rows_type = ctx.dtypes
        lead = 0 if to_dense is None else dim
        if ctx.by_kernel:
            both = _dots_backward(gradient, combined, lead)
            return _split(both, None if to_dense is None else both[:, 0], to_dense, to_rows_type)
        if ctx.take is None:
            products = _symmetric(gradient[:, lead:], positions[0], num_rows)
        else:
            products = combined.new_empty(len(combined), num_rows, num_rows)
            positions, diagonal = _pairs_both_ways(num_rows, lead)
            _take(ctx.take, gradient.contiguous(), positions, products.flatten(1), 0, diagonal)
        both = torch.bmm(products, combined)
        first = None if to_dense is None else both[:, 0] + gradient[:, :dim]
        return _split(both, first, to_dense, to_rows_type)


def _split(
    both: torch.Tensor, first: torch.Tensor | None, to_dense: torch.dtype | None, to_rows_type: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor, None, None, None]:
    """The gradients of dense and of rows, where `both` [B, F + 1, D] has that of dense, which is `first`, ahead of the others."""
    to_rows = both if first is None else both[:, 1:]
    if to_rows.dtype != to_rows_type:
        to_rows = to_rows.to(to_rows_type, memory_format=torch.contiguous_format)
    return None if first is None else first.to(to_dense), to_rows, None, None, None


def _in_place(dense: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`dense` written into the room ahead of `rows`, and the whole [B, F + 1, D]; None where there is no such room."""
    batch, num_features, dim = rows.shape
    strides, count = ((num_features + 1) * dim, dim, 1), batch * (num_features + 1) * dim
    is_slice = rows.stride() == strides and rows.storage_offset() == dim
    if not is_slice or rows.dtype != dtype or rows.untyped_storage().nbytes() != count * rows.element_size():
        return None
    # Not rows itself: autograd would see its memory change.
    combined = rows.data.as_strided((batch, num_features + 1, dim), strides, 0)
    combined[:, 0] = dense
    return combined


def _combined(dense: torch.Tensor | None, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, D] and [B, F, D] -> [B, F + 1, D], cast on the way; without dense the rows."""
    if dense is None:
        return rows.to(dtype).contiguous()
    if torch.compiler.is_compiling() or not in_host_memory(dense):
        return torch.cat([dense.to(dtype).unsqueeze(1), rows.to(dtype)], dim=1)
    combined = dense.new_empty(len(dense), rows.shape[1] + 1, rows.shape[2], dtype=dtype)
    combined[:, 0], combined[:, 1:] = dense, rows
    return combined


def _symmetric(gradient: torch.Tensor, both_ways: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[B, P] -> G + G^T [B, n, n], where the upper triangle of G holds the columns, row by row."""
    with_zero = torch.nn.functional.pad(gradient, (0, 1))
    return with_zero.index_select(1, both_ways).view(len(gradient), num_rows, num_rows)


def _positions(device: torch.device, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = _pairs(num_rows).astype(np.int64)
    both_ways, diagonal = _pairs_both_ways(num_rows, 0)
    places = both_ways.astype(np.int64)
    places[diagonal.astype(np.int64)] = len(pairs)
    return torch.tensor(pairs.tolist(), device=device), torch.tensor(places.tolist(), device=device)


@cache
def _pairs(num_rows: int) -> np.ndarray[Any, Any]:
    """Where the pairs above the diagonal lie in a flat [n, n], row by row."""
    first, second = np.triu_indices(num_rows, 1)
    return (first * num_rows + second).astype(np.uint64)


@cache
def _pairs_both_ways(num_rows: int, lead: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where each of a flat [n, n] lies in [lead + pairs above the diagonal]; then the diagonal, which lies nowhere."""
    positions = np.zeros((num_rows, num_rows), np.uint64)
    above = np.triu_indices(num_rows, 1)
    positions[above] = positions.T[above] = lead + np.arange(len(above[0]))
    return positions.reshape(-1), np.arange(0, num_rows**2, num_rows + 1, dtype=np.uint64)


def _suits_kernel(rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel multiplies: of wide rows in bf16 where the CPU has an instruction for that, else they are oneDNN's."""
    if type(rows) is not torch.Tensor and not is_recorded("dots"):
        return False
    return dtype == torch.float32 or rows.shape[2] <= WIDEST_BF16 or _has_pairs()


def _multiplies_pairs(rows: torch.Tensor) -> bool:
    return rows.dtype == torch.bfloat16 and rows.shape[2] > WIDEST_BF16 and _has_pairs()


def _has_pairs() -> bool:
    """Whether this CPU multiplies pairs in bf16."""
    intrinsics = kernels("pipeline.devices.cpu.kernels.layer_intrinsics")
    return intrinsics is not None and intrinsics.multiplies_bf16()


def _dots(combined: torch.Tensor, lead: int) -> torch.Tensor:
    """combined [B, n, D] -> the first `lead` numbers of a sample, then its pairs: [B, lead + n (n - 1) / 2]."""
    from pipeline.devices.cpu.kernels.dots import dots, dots_of_pairs

    batch, num_rows, dim = combined.shape
    out = combined.new_empty(batch, lead + num_rows * (num_rows - 1) // 2)
    if type(combined) is not torch.Tensor:
        record("dots", combined, out)
        return out
    kernel = dots_of_pairs if _multiplies_pairs(combined) else dots
    on_all_threads(kernel, (_flat(combined), *map(np.uint64, (num_rows, dim, lead)), _flat(out)), batch)
    return out


def _dots_backward(gradient: torch.Tensor, combined: torch.Tensor, lead: int) -> torch.Tensor:
    """The gradient of combined [B, n, D], in its type."""
    from pipeline.devices.cpu.kernels.dots import dots_backward, dots_of_pairs_backward

    batch, num_rows, dim = combined.shape
    out = torch.empty_like(combined)
    if type(combined) is not torch.Tensor:
        record("dots_backward", combined, gradient, out)
        return out
    sizes = map(np.uint64, (num_rows, dim, lead))
    kernel = dots_of_pairs_backward if _multiplies_pairs(combined) else dots_backward
    on_all_threads(kernel, (_flat(gradient.contiguous()), _flat(combined), *sizes, _flat(out)), batch)
    return out


def _flat(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """All numbers of a contiguous tensor in one row; bf16 as uint16."""
    return (values if values.dtype == torch.float32 else values.view(torch.uint16)).numpy().reshape(-1)


def _fits_kernel(rows: torch.Tensor, dtype: torch.dtype) -> bool:
    return can_read(rows, "take") and dtype in AS_BITS


def _kernel() -> Callable[..., None] | None:
    compiled = kernels("pipeline.devices.cpu.kernels.dots")
    return None if compiled is None else compiled.take


def _take(
    kernel: Callable[..., None],
    source: torch.Tensor,
    positions: np.ndarray[Any, Any],
    into: torch.Tensor,
    first: int,
    blanks: np.ndarray[Any, Any] = NOWHERE,
) -> None:
    """into[:, first:][b, i] = source[b, positions[i]], and 0 at the blanks, by as many threads as torch has."""
    if type(source) is not torch.Tensor:
        record("take", source, into)
        return
    bits = AS_BITS[source.dtype]
    arguments = source.view(bits).numpy(), positions, blanks, into.view(bits).numpy(), np.uint64(first)
    on_all_threads(kernel, arguments, len(source))


def pairs_kernel(products: torch.Tensor) -> tuple[Callable[[], None] | None, int]:
    """A call that picks the pairs above the diagonal of [B, n, n], and the bytes that it goes over; None without Numba."""
    kernel = _kernel()
    if kernel is None:
        return None, 0
    pairs, flat = _pairs(products.shape[1]), products.flatten(1)
    into = products.new_empty(len(products), len(pairs))
    return lambda: _take(kernel, flat, pairs, into, 0), flat.nbytes + into.nbytes


def dots_kernels(rows: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Calls of the kernels that multiply rows [B, n, D] and that take their gradient, where they do that for such rows."""
    if _kernel() is None or rows.dtype not in AS_BITS or not _suits_kernel(rows, rows.dtype):
        return {}
    gradient = torch.ones_like(_dots(rows, 0))
    return {"dots": lambda: _dots(rows, 0), "dots_backward": lambda: _dots_backward(gradient, rows, 0)}
