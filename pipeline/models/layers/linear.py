"""The modules of logistic regression, FM and Wide&Deep."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.models.layers.interaction import PooledRows


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


class LogisticRegression(nn.Module):
    """forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]: the weight of an id is the sum of its row."""

    def __init__(self, embedding_bag_collection: nn.Module, num_dense_features: int) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_term = DenseTerm(num_dense_features)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        weights = self.embedding_bag_collection(sparse_features).values()  # summed, so in any order
        logits: torch.Tensor = weights.sum(dim=1, keepdim=True) + self.dense_term(dense_features)
        return logits


class FactorizationMachine(nn.Module):
    """forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1].

    A row of a table is a vector and, in its last column, a linear weight.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        feature_names: list[str],
        embedding_dim: int,
        num_dense_features: int,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.pooled_rows = PooledRows(feature_names)
        self.over_arch = PairTerms(num_dense_features, embedding_dim - 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.pooled_rows(self.embedding_bag_collection(sparse_features))
        logits: torch.Tensor = self.over_arch(dense_features, rows)
        return logits


class PairTerms(nn.Module):
    """dense [B, num_dense], rows [B, F, D + 1] -> [B, 1]: linear terms, and the dot product of every pair of vectors.

    The pairs' sum is ((sum of vectors)^2 - sum of vectors^2) / 2 (Rendle 2010, lemma 3.1).
    """

    def __init__(self, num_dense_features: int, dim: int) -> None:
        super().__init__()
        self.dense_term = DenseTerm(num_dense_features)
        self.dense_vectors = nn.Parameter(torch.empty(num_dense_features, dim)) if num_dense_features else None
        if self.dense_vectors is not None:
            nn.init.normal_(self.dense_vectors, std=0.01)

    def forward(self, dense_features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        vectors, weights = rows[:, :, :-1], rows[:, :, -1]
        total, squares = vectors.sum(dim=1), vectors.square().sum(dim=1)
        if self.dense_vectors is not None:
            total = total + dense_features @ self.dense_vectors
            squares = squares + dense_features.square() @ self.dense_vectors.square()
        pairs = (total.square() - squares).sum(dim=1, keepdim=True) / 2
        return pairs + weights.sum(dim=1, keepdim=True) + self.dense_term(dense_features)


class WideDeep(nn.Module):
    """forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]; tables may differ in embedding_dim."""

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dims: dict[str, int],
        num_dense_features: int,
        hidden_layer_sizes: list[int],
    ) -> None:
        """`dims` maps each feature to its table's embedding_dim."""
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.split = WideAndDeepColumns(list(dims))
        self.dense_term = DenseTerm(num_dense_features)
        width = sum(dims.values()) - len(dims) + num_dense_features
        self.deep_arch = nn.Sequential(MLP(width, hidden_layer_sizes), nn.Linear(hidden_layer_sizes[-1], 1))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        weights, vectors = self.split(self.embedding_bag_collection(sparse_features))
        deep = self.deep_arch(torch.cat([dense_features, vectors], dim=1))
        logits: torch.Tensor = deep + weights + self.dense_term(dense_features)
        return logits


class WideAndDeepColumns(nn.Module):
    """KeyedTensor -> (sum of all last columns [B, 1], the other columns [B, sum of dims - F] in the order of features)."""

    def __init__(self, feature_names: list[str]) -> None:
        super().__init__()
        self.feature_names = feature_names

    def forward(self, pooled: KeyedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [pooled[name] for name in self.feature_names]
        weights = torch.stack([row[:, -1] for row in rows], dim=1).sum(dim=1, keepdim=True)
        return weights, torch.cat([row[:, :-1] for row in rows], dim=1)
