"""Add up the dot products of every pair of vectors (factorization machines: Rendle, ICDM 2010), and linear terms."""

from __future__ import annotations

import torch
from torch import nn

from pipeline.models.layers.features import FeatureInputs


class DenseTerm(nn.Module):
    """dense_features [B, num_dense] -> weights . dense + bias [B, 1]; the bias alone where there are none."""

    def __init__(self, num_dense_features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.Parameter(torch.zeros(num_dense_features, 1)) if num_dense_features else None

    def forward(self, dense_features: torch.Tensor) -> torch.Tensor:
        if self.weights is None:
            return self.bias.expand(dense_features.shape[0], 1)  # len() would fix the batch size under torch.export
        return dense_features @ self.weights + self.bias


class PairTerms(nn.Module):
    """dense [B, num_dense], rows [B, F, D + 1] -> [B, 1]: linear terms, and the dot product of every pair of vectors.

    The last column of a row is its linear weight. A dense feature is a learnt vector times its value, or with
    `dense_as_vectors` False a linear term alone.
    """

    def __init__(
        self, num_dense_features: int, dim: int, dense_as_vectors: bool = True, linear_scale: float = 1.0
    ) -> None:
        super().__init__()
        self._linear_scale = linear_scale
        self.dense_term = DenseTerm(num_dense_features)
        has_vectors = bool(num_dense_features) and dense_as_vectors
        self.dense_vectors = nn.Parameter(torch.empty(num_dense_features, dim)) if has_vectors else None
        if self.dense_vectors is not None:
            nn.init.normal_(self.dense_vectors, std=0.01)

    def forward(self, dense_features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        vectors, linear = split_rows(rows)
        total, squares = vectors.sum(dim=1), vectors.square().sum(dim=1)
        if self.dense_vectors is not None:
            total = total + dense_features @ self.dense_vectors
            squares = squares + dense_features.square() @ self.dense_vectors.square()
        pairs = (total.square() - squares).sum(dim=1, keepdim=True) / 2
        logits: torch.Tensor = pairs + scaled(linear, self._linear_scale) + self.dense_term(dense_features)
        return logits


def split_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [B, F, D + 1] -> vectors [B, F, D], the sum of their linear weights [B, 1]."""
    return rows[:, :, :-1], rows[:, :, -1].sum(dim=1, keepdim=True)


def scaled(weights: torch.Tensor, linear_scale: float) -> torch.Tensor:
    return weights if linear_scale == 1.0 else weights * linear_scale


def pair_products(vectors: torch.Tensor) -> torch.Tensor:
    """[B, F, D] -> [B, 1]: the sum of the dot products of all pairs.

    It is ((sum of vectors)^2 - sum of vectors^2) / 2 (Rendle 2010, lemma 3.1).
    """
    return (vectors.sum(dim=1).square().sum(dim=1, keepdim=True) - vectors.square().sum(dim=(1, 2))[:, None]) / 2


class FMAndDeep(nn.Module):
    """dense [B, num_dense], rows [B, F, D + 1] -> logits [B, 1]: linear terms, all pairs of vectors, and an MLP over them.

    The last column of a row is its linear weight.
    """

    def __init__(
        self, inputs: FeatureInputs, num_dense_features: int, deep: nn.Module, linear_scale: float = 1.0
    ) -> None:
        super().__init__()
        self._linear_scale = linear_scale
        self.inputs, self.deep = inputs, deep
        self.dense_term = DenseTerm(num_dense_features)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        own, weights = split_rows(rows)
        vectors, inputs = self.inputs(dense, own)
        linear = scaled(weights, self._linear_scale) + self.dense_term(dense)
        logits: torch.Tensor = self.deep(inputs) + pair_products(vectors) + linear
        return logits
