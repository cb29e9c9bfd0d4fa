"""Combine vectors by products of their columns, one degree per layer: the compressed interaction
network (arXiv 1803.05170).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.fm import DenseTerm, scaled, split_rows


class CompressedInteraction(nn.Module):
    """Map vectors [B, F, D] to [B, sum of layer_sizes]: each layer's vectors, summed over their
    columns.

    A vector of layer k is a bias and a weighted sum of all column-wise products of a vector of
    layer k - 1 with a vector of the first layer (arXiv 1803.05170, equation 6; without activation,
    which the paper found best).
    """

    def __init__(self, num_vectors: int, layer_sizes: Sequence[int]) -> None:
        super().__init__()
        self.out_features = sum(layer_sizes)
        before = [num_vectors, *layer_sizes]
        self.layers = nn.ModuleList(
            nn.Linear(number * num_vectors, size) for number, size in zip(before, layer_sizes, strict=False)
        )

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        first = last = vectors.transpose(1, 2)  # [B, D, F]: products of a column are adjacent for the matrix product
        sums = []
        for layer in self.layers:
            products = (last.unsqueeze(3) * first.unsqueeze(2)).flatten(2)
            last = layer(products)
            sums.append(last.sum(dim=1))
        return torch.cat(sums, dim=1)


class CINAndDeep(nn.Module):
    """Map dense [B, num_dense] and rows [B, F, D + 1] to logits [B, 1]: linear terms, a CIN, and an
    optional MLP.

    The last column of a row is its linear weight.
    """

    def __init__(
        self,
        inputs: FeatureInputs,
        num_dense_features: int,
        layer_sizes: Sequence[int],
        deep: nn.Module | None,
        linear_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self._linear_scale = linear_scale
        self.inputs, self.deep = inputs, deep
        self.dense_term = DenseTerm(num_dense_features)
        self.cin = CompressedInteraction(inputs.num_vectors, layer_sizes)
        self.last = nn.Linear(self.cin.out_features, 1, bias=False)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        own, weights = split_rows(rows)
        vectors, inputs = self.inputs(dense, own)
        logits: torch.Tensor = self.last(self.cin(vectors)) + scaled(weights, self._linear_scale)
        logits = logits + self.dense_term(dense)
        return logits if self.deep is None else logits + self.deep(inputs)
