"""Compute linear terms and all pairs' dot products (factorization machines: Rendle, ICDM 2010)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.models.layers.features import FeatureInputs


class DenseTerm(nn.Module):
    """Map dense_features [B, num_dense] to weights . dense + bias [B, 1], or to the bias if there are none."""

    def __init__(self, num_dense_features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.Parameter(torch.zeros(num_dense_features, 1)) if num_dense_features else None

    def forward(self, dense_features: torch.Tensor) -> torch.Tensor:
        if self.weights is None:
            # len() would fix the batch size under torch.export
            return self.bias.expand(dense_features.shape[0], 1)
        return dense_features @ self.weights + self.bias


class PairTerms(nn.Module):
    """Map dense [B, num_dense], rows [B, F, D + 1] to [B, 1]: linear terms plus all pairs' dot
    products.

    The last column of a row is its linear weight. A dense feature gives a vector (a learnt vector
    times the value), or only a linear term if `dense_as_vectors` is False.
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
        total, squares, linear = _SumsOfRows.apply(rows)
        if self.dense_vectors is not None:
            total = total + dense_features @ self.dense_vectors
            squares = squares + dense_features.square() @ self.dense_vectors.square()
        pairs = (total.square() - squares).sum(dim=1, keepdim=True) / 2
        logits: torch.Tensor = pairs + scaled(linear, self._linear_scale) + self.dense_term(dense_features)
        return logits


class _SumsOfRows(torch.autograd.Function):
    """Map rows [B, F, D + 1] to the sum of vectors [B, D], of squares [B, D], and of last columns
    [B, 1].

    Backward writes the gradient once; autograd would add up one zero-filled tensor per slice.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(rows)
        vectors = rows[:, :, :-1]
        return vectors.sum(dim=1), vectors.square().sum(dim=1), rows[:, :, -1].sum(dim=1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, totals: torch.Tensor, squares: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        (rows,) = ctx.saved_tensors
        vectors = rows[:, :, :-1] * (2 * squares)[:, None]
        vectors += totals[:, None]
        return torch.cat([vectors, linear[:, :, None].expand(-1, rows.shape[1], 1)], dim=2)


class _SplitRows(torch.autograd.Function):
    """Map rows [B, F, D + 1] to vectors [B, F, D] and the sum of last columns [B, 1]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[:, :, :-1], rows[:, :, -1].sum(dim=1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, vectors: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
        return torch.cat([vectors, linear[:, :, None].expand(-1, vectors.shape[1], 1)], dim=2)


def split_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows [B, F, D + 1] into vectors [B, F, D] and the sum of linear weights [B, 1]."""
    return _SplitRows.apply(rows)


def scaled(weights: torch.Tensor, linear_scale: float) -> torch.Tensor:
    return weights if linear_scale == 1.0 else weights * linear_scale


class _PairProducts(torch.autograd.Function):
    """Compute in backward (sum of vectors - vector) in one operation, rounded as autograd would round it."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor) -> torch.Tensor:
        total = vectors.sum(dim=1)
        ctx.save_for_backward(vectors, total)
        return (total.square().sum(dim=1, keepdim=True) - vectors.square().sum(dim=(1, 2))[:, None]) / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        vectors, total = ctx.saved_tensors
        return (total * gradient)[:, None] - vectors * gradient[:, :, None]


def pair_products(vectors: torch.Tensor) -> torch.Tensor:
    """Map [B, F, D] to the sum of all pairs' dot products [B, 1]: ((sum v)^2 - sum v^2) / 2."""
    return _PairProducts.apply(vectors)


class FMAndDeep(nn.Module):
    """Map dense [B, num_dense], rows [B, F, D + 1] to logits [B, 1]: linear terms plus pairs' products plus an MLP."""

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
