"""Stack factorization machines that map vectors to vectors (Wukong, arXiv 2403.02545, section 3)."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.mlp import MLP


class FactorizationBlock(nn.Module):
    """Map X [B, num_vectors, dim] to [B, num_out, dim]: MLP(layer norm(X X^T Y)).

    Y [num_vectors, rank] is learnt. X^T Y is computed first, so the cost grows with num_vectors,
    not with its square.
    """

    def __init__(self, num_vectors: int, rank: int, dim: int, mlp: MLP) -> None:
        """mlp: its last layer has num_out * dim columns."""
        super().__init__()
        self._dim = dim
        self.projection = nn.Parameter(nn.init.xavier_normal_(torch.empty(rank, num_vectors)))
        self.norm, self.mlp = nn.LayerNorm(num_vectors * rank), mlp

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        products = vectors @ (self.projection @ vectors).transpose(1, 2)  # [B, num_vectors, rank]
        found: torch.Tensor = self.mlp(self.norm(products.flatten(1)))
        return found.unflatten(1, (-1, self._dim))


class WukongLayer(nn.Module):
    """Map X [B, num_vectors, dim] to [B, num_fm_vectors + num_linear_vectors, dim]: layer norm of
    X plus the outputs of both blocks.

    `block` gives the first vectors, sums of the input vectors are the last. If the number of
    vectors changes, X is mapped to the new number by further sums.
    """

    def __init__(self, num_vectors: int, num_fm_vectors: int, num_linear_vectors: int, block: FactorizationBlock):
        super().__init__()
        num_out = num_fm_vectors + num_linear_vectors
        self.block, self.linear = block, nn.Linear(num_vectors, num_linear_vectors, bias=False)
        self.residual = None if num_out == num_vectors else nn.Linear(num_vectors, num_out, bias=False)
        self.norm = nn.LayerNorm(block._dim)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        columns = vectors.transpose(1, 2)
        outputs = torch.cat([self.block(vectors), self.linear(columns).transpose(1, 2)], dim=1)
        kept = vectors if self.residual is None else self.residual(columns).transpose(1, 2)
        normalized: torch.Tensor = self.norm(outputs + kept)
        return normalized


class StackedVectors(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to logits [B, 1]: layers of vectors, and then `over` on all their columns."""

    def __init__(self, inputs: FeatureInputs, layers: list[WukongLayer], over: MLP) -> None:
        super().__init__()
        self.inputs, self.layers, self.over = inputs, nn.Sequential(*layers), over

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        vectors, _ = self.inputs(dense, rows)
        logits: torch.Tensor = self.over(self.layers(vectors).flatten(1))
        return logits
