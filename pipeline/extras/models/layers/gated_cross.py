"""Cross columns with each other through gates (GDCN, arXiv 2311.04635)."""

from __future__ import annotations

import torch
from torch import nn


class GatedCross(nn.Module):
    """Map first, last [B, width] to first * (W last + b) * sigmoid(V last) + last (section 3.1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cross, self.gate = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(last, first * self.cross(last), torch.sigmoid(self.gate(last)))
