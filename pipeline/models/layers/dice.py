"""Dice, the activation of DIN: a PReLU whose bend is where the batch's values are (arXiv 1706.06978, 4.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.models.layers.batch_norm import BatchNorm


class Dice(nn.Module):
    """[rows, width] -> [rows, width]: p x + (1 - p) alpha x, with p the sigmoid of x normalized over the rows of all ranks.

    Collective while training, as BatchNorm is, whose running mean and variance are state. `alpha` begins at 0.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = BatchNorm(width, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _Bent.apply(rows, self.norm(rows), self.alpha)  # type: ignore[no-any-return,no-untyped-call]


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
