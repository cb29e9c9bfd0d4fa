"""Define DIN's attention unit, which weights each position of a sequence by its relevance to the
target (arXiv 1706.06978, 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.config.model import LayerSettings
from pipeline.models.layers.mlp import MLP, Activation


class TargetAttention(nn.Module):
    """Map target [B, Q], rows [B, L, K] and mask [B, L] to [B, K]: the sum of the rows, weighted by
    an MLP.

    The MLP reads the target, the row, their difference, their product, and the row's side
    information. It does not read padding: during training the rows of all samples are one matrix
    [ids, K], over which Dice takes its mean and variance. softmax: scale the weights so that they
    add up to 1. The paper does not scale them, so that many similar rows count more.
    """

    def __init__(
        self, target_width: int, row_width: int, layer_sizes: Sequence[int], settings: LayerSettings, softmax: bool
    ) -> None:
        super().__init__()
        self._softmax = softmax
        self._widths = [target_width] * 3 + [row_width - target_width, target_width]
        first, *further = layer_sizes
        self.first = nn.Linear(sum(self._widths), first)
        self.activation = Activation(settings.activation, first)
        self.layers = MLP(first, further, settings, out_features=1)

    def forward(self, target: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = self._jagged(target, rows, mask) if self.training else self._padded(target, rows)
        if self._softmax:
            weights = torch.softmax(weights.masked_fill(~mask, -1e9), dim=1)
        weights = weights * mask  # the row of a position without an id counts nothing
        return torch.bmm(weights.unsqueeze(1).to(rows.dtype), rows).squeeze(1)

    def _jagged(self, target: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the weights [B, L], computed only for positions with an id; other weights are zero."""
        positions = mask.flatten().nonzero().squeeze(1)
        hidden = self._hidden(target, rows)
        if len(positions) < mask.numel():
            hidden = hidden.index_select(0, positions)
        found = self.layers(self.activation(hidden)).squeeze(1)
        return found.new_zeros(mask.numel()).index_copy(0, positions, found).view(mask.shape)

    def _padded(self, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the weights [B, L], computed for every position."""
        found: torch.Tensor = self.layers(self.activation(self._hidden(target, rows)))
        return found.view(rows.shape[:2])

    def _hidden(self, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return [B * L, hidden] = W [q, k, q - k, side, q k] = (Wq + Wd) q + (Wk - Wd + Wp
        diag(q)) k + Ws side.

        Terms that depend only on the target are computed once per sample, and so is the matrix that
        multiplies the rows k.
        """
        of_target, of_row, of_difference, of_side, of_product = self.first.weight.split(self._widths, dim=1)
        at_target = F.linear(target, of_target + of_difference, self.first.bias)
        at_row = target.unsqueeze(2) * of_product.t() + (of_row - of_difference).t()  # [B, Q, hidden]
        if of_side.shape[1]:
            at_row = torch.cat([at_row, of_side.t().expand(target.shape[0], -1, -1)], dim=1)
        return torch.baddbmm(at_target.unsqueeze(1), rows, at_row).flatten(0, 1)
