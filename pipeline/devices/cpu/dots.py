"""Multiply the rows of each sample with each other by a compiled kernel.

These are DLRM's dot products (arXiv 1906.00091, 2.1.3). torch's batched product of small matrices
takes several times as long as its arithmetic and computes each pair twice. The kernel multiplies in
fp32; rows and products are fp32 or bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pipeline.devices.cpu.kernel_pool import can_read, kernels, on_all_threads

KERNELS = "pipeline.devices.cpu.kernels.dots"
DTYPES = (torch.float32, torch.bfloat16)


def multiplies_rows(rows: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports these rows. dtype: the type of the products."""
    return dtype in DTYPES and can_read(rows) and kernels(KERNELS) is not None


def dots(rows: torch.Tensor, lead: int) -> torch.Tensor:
    """Multiply the rows of each sample with each other. rows [B, n, D] must be contiguous.

    Returns [B, lead + n (n - 1) / 2]: the first `lead` numbers of a sample, then the products of
    its pairs.
    """
    batch, num_rows, dim = rows.shape
    out = rows.new_empty(batch, lead + num_rows * (num_rows - 1) // 2)
    sizes = map(np.uint64, (num_rows, dim, lead))
    on_all_threads(_module().dots, (_flat(rows), *sizes, _flat(out)), batch)
    return out


def dots_backward(gradient: torch.Tensor, rows: torch.Tensor, lead: int) -> torch.Tensor:
    """Return the gradient of rows [B, n, D], in their type."""
    batch, num_rows, dim = rows.shape
    out = torch.empty_like(rows)
    sizes = map(np.uint64, (num_rows, dim, lead))
    arguments = (_flat(gradient.contiguous()), _flat(rows), *sizes, _flat(out))
    on_all_threads(_module().dots_backward, arguments, batch)
    return out


def dots_kernels(rows: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return calls of both kernels on rows [B, n, D] by name, or nothing if the kernels do not
    support the rows.
    """
    if not multiplies_rows(rows, rows.dtype):
        return {}
    gradient = torch.ones_like(dots(rows, 0))
    return {"dots": lambda: dots(rows, 0), "dots_backward": lambda: dots_backward(gradient, rows, 0)}


def _module() -> Any:
    return kernels(KERNELS)


def _flat(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the numbers of a contiguous tensor as one row; bf16 as uint16."""
    return (values if values.dtype == torch.float32 else values.view(torch.uint16)).numpy().reshape(-1)
