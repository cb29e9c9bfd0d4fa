"""Cross columns with each other through gates (GDCN, arXiv 2311.04635)."""

from __future__ import annotations

import torch
from torch import nn


class CrossLinear(nn.Linear):
    """Linear layer whose biases do not start at 0."""

    def initialize_bias(self) -> None:
        nn.init.uniform_(self.bias)


class GatedCross(nn.Module):
    """Map first, last [B, width] to first * (W last + b) * sigmoid(V last) + last (section 3.1).

    b starts uniform in [0, 1), as in the authors' code.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cross, self.gate = CrossLinear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(last, first * self.cross(last), torch.sigmoid(self.gate(last)))
