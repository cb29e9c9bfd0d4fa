"""Normalize columns by the mean and variance of the global batch, over all ranks, on any device.

torch's SyncBatchNorm refuses CPU tensors. With statistics of one rank's rows, training would depend
on the world size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.devices.cpu.host_exchange import all_gather, all_reduce, num_exchanging_ranks


class BatchNorm(nn.Module):
    """Map [B, width] -> [B, width], as nn.BatchNorm1d would on the rows of all ranks (arXiv
    1502.03167).

    Collective during training, with any number of rows; forward and backward exchange one message
    each. The running mean and variance are equal on all ranks. Evaluation exchanges nothing.
    Statistics are float32; the output has the input's dtype.
    """

    def __init__(self, width: int, momentum: float = 0.1, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.width = width
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.register_parameter("weight", nn.Parameter(torch.ones(width)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if affine else None)
        self.running_mean: torch.Tensor
        self.running_var: torch.Tensor
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and num_exchanging_ranks() > 1:
            return _over_all_ranks(self, rows)
        normalized = F.batch_norm(
            rows.float(),
            self.running_mean.float(),  # no change, except in layers that were exported in bf16
            self.running_var.float(),
            None if self.weight is None else self.weight.float(),
            None if self.bias is None else self.bias.float(),
            self.training and len(rows) > 1,  # one row has no variance
            self.momentum,
            self.eps,
        )
        return normalized.to(rows.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, momentum={self.momentum}, eps={self.eps}"


@torch.compiler.disable
def _over_all_ranks(norm: BatchNorm, rows: torch.Tensor) -> torch.Tensor:
    values = rows.float()
    mean, variance, count = _global_statistics(values.detach())
    with torch.no_grad():
        momentum = norm.momentum * (count > 1)
        norm.running_mean.lerp_(mean, momentum)
        # The variance of the population, as in torch.
        norm.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), momentum)
    scale = torch.rsqrt(variance + norm.eps)
    normalized = _Normalize.apply(values, mean, scale, count)
    if norm.weight is not None and norm.bias is not None:
        normalized = torch.addcmul(norm.bias, normalized, norm.weight)
    return normalized.to(rows.dtype)


def _global_statistics(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collective: return mean [width], variance [width] and number of all ranks' rows, with equal
    bits on all.

    Each rank sends squared deviations from its mean. They are precise even if means are large.
    """
    local_count = rows.new_tensor([rows.shape[0]])
    local_mean = rows.sum(dim=0) / local_count.clamp(min=1)
    squares_about = (rows - local_mean).square().sum(dim=0)
    gathered = all_gather(torch.cat([local_count, local_mean, squares_about]))
    width = rows.shape[1]
    counts, means, squares = gathered.split([1, width, width], dim=1)
    count = counts.sum().clamp(min=1)
    mean = (counts * means).sum(dim=0) / count
    variance = (squares + counts * (means - mean).square()).sum(dim=0) / count
    return mean, variance, count


class _Normalize(torch.autograd.Function):
    """Compute (rows - mean) * scale, where mean and scale depend on the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        normalized = (rows - mean) * scale
        ctx.save_for_backward(normalized, scale, count)
        return normalized

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        normalized, scale, count = ctx.saved_tensors
        sums = torch.stack([gradient.sum(dim=0), (gradient * normalized).sum(dim=0)])
        all_reduce(sums)
        mean, slope = sums / count
        return (gradient - mean - normalized * slope) * scale, None, None, None
