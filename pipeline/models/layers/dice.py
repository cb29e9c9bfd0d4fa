"""Dice, the activation of DIN: a PReLU whose bend is where the batch's values are (arXiv 1706.06978, 4.3)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.devices.cpu.host_exchange import all_reduce, num_exchanging_ranks
from pipeline.devices.cpu.kernel_pool import can_read, kernels, on_all_threads
from pipeline.models.layers.batch_norm import BatchNorm, gather_statistics


class Dice(nn.Module):
    """[rows, width] -> [rows, width]: p x + (1 - p) alpha x, with p the sigmoid of x normalized over the rows of all ranks.

    Collective while training, as BatchNorm is, whose running mean and variance are state. `alpha` begins at 0.
    While training in float32 on a CPU, kernels of our own go over the rows, if Numba is there (`uses_kernel`).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = BatchNorm(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))
        self.uses_kernel = True

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.training and self.uses_kernel and _fits_kernels(rows, self.alpha):
            return _by_kernels(self, rows)
        return _Bent.apply(rows, self.norm(rows), self.alpha)  # type: ignore[no-any-return,no-untyped-call]


def _by_kernels(dice: Dice, rows: torch.Tensor) -> torch.Tensor:
    mean, variance, count = _statistics(rows.detach())
    if count > 1:
        dice.norm.follow(mean, variance, count)
    else:  # one row has no variance: it is normalized by what is known of those before
        mean, variance, count = dice.norm.running_mean.clone(), dice.norm.running_var, 0.0
    scale = torch.rsqrt(variance + dice.norm.eps)
    return _BentByKernels.apply(rows, mean, scale, dice.alpha, count)  # type: ignore[no-any-return,no-untyped-call]


class _Bent(torch.autograd.Function):
    """rows * (alpha + (1 - alpha) sigmoid(normalized)), by fewer passes over memory than autograd's of the four operations."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, normalized: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        share = torch.sigmoid(normalized)
        ctx.save_for_backward(rows, share, alpha)
        return rows * torch.addcmul(alpha, share, 1.0 - alpha)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        rows, share, alpha = ctx.saved_tensors
        slope = 1.0 - alpha
        to_rows = torch.addcmul(alpha, share, slope).mul_(gradient)
        at_gate = gradient * rows
        total = at_gate.sum(dim=0)
        at_gate.mul_(share)
        to_alpha = total - at_gate.sum(dim=0)
        return to_rows, torch.addcmul(at_gate, at_gate, share, value=-1.0).mul_(slope), to_alpha


class _BentByKernels(torch.autograd.Function):
    """Norm and bend of the rows at once. `count`: of the rows of all ranks that mean and scale are of; 0: of none of these."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, alpha: torch.Tensor, count: float
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, mean, scale, alpha)
        ctx.count = count
        out, compiled = torch.empty_like(rows), _kernels()
        assert compiled is not None
        on_all_threads(compiled.bend, [_array(each) for each in (rows, mean, scale, alpha, out)], len(rows))
        return out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, torch.Tensor, None]:
        compiled, gradient = _kernels(), gradient.contiguous()
        assert compiled is not None
        rows, mean, scale, alpha = ctx.saved_tensors
        inputs = [_array(each) for each in (rows, gradient, mean, scale, alpha)]
        blocks = _num_blocks(rows, compiled)
        sums = rows.new_empty(blocks, 3, rows.shape[1])
        on_all_threads(compiled.gradient_sums, [*inputs, _array(sums)], blocks, least_share=1)
        total = sums.double().sum(dim=0).float()
        over_rows, to_alpha = total[:2].contiguous(), total[2]
        if ctx.count and num_exchanging_ranks() > 1:
            all_reduce(over_rows)
        level, slope = over_rows / ctx.count if ctx.count else torch.zeros_like(over_rows)
        out = torch.empty_like(rows)
        on_all_threads(compiled.unbend, [*inputs, *(_array(each) for each in (level, slope, out))], len(rows))
        return out, None, None, to_alpha, None


def _statistics(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean [width], variance [width] and number of the rows of all ranks. Collective where there are several ranks."""
    compiled = _kernels()
    assert compiled is not None
    blocks = _num_blocks(rows, compiled)
    means, squares = rows.new_empty(2, blocks, rows.shape[1])
    on_all_threads(compiled.statistics, [_array(each) for each in (rows, means, squares)], blocks, least_share=1)
    sizes = torch.full((blocks, 1), float(compiled.BLOCK), dtype=torch.float64)
    sizes[-1:] = len(rows) - int(compiled.BLOCK) * (blocks - 1)
    of_blocks, divisor = means.double(), max(len(rows), 1)
    mean = (sizes * of_blocks).sum(dim=0) / divisor
    about = squares.double().sum(dim=0) + (sizes * (of_blocks - mean).square()).sum(dim=0)
    if num_exchanging_ranks() == 1:
        return mean.float(), (about / divisor).float(), float(len(rows))
    own = torch.cat([torch.tensor([float(len(rows))]), mean.float(), about.float()])
    found, variance, count = gather_statistics(own)
    return found, variance, float(count)


def _num_blocks(rows: torch.Tensor, compiled: ModuleType) -> int:
    return -(-len(rows) // int(compiled.BLOCK))


def _array(values: torch.Tensor) -> np.ndarray[Any, Any]:
    return values.detach().numpy()


def _fits_kernels(rows: torch.Tensor, alpha: torch.Tensor) -> bool:
    return (
        can_read(rows)
        and rows.dtype == alpha.dtype == torch.float32
        and rows.is_contiguous()
        and _kernels() is not None
    )


def _kernels() -> ModuleType | None:
    return kernels("pipeline.devices.cpu.kernels.dice")
