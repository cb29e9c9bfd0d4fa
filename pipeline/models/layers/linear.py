"""Define the modules of logistic regression and Wide&Deep."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.config.model import LayerSettings
from pipeline.models.layers.fm import DenseTerm
from pipeline.models.layers.mlp import MLP


class LogisticRegression(nn.Module):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]."""

    def __init__(self, embedding_bag_collection: nn.Module, num_dense_features: int) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_term = DenseTerm(num_dense_features)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        # they are summed, so the order does not matter
        weights = self.embedding_bag_collection(sparse_features).values()
        logits: torch.Tensor = weights.sum(dim=1, keepdim=True) + self.dense_term(dense_features)
        return logits


class WideDeep(nn.Module):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]. Tables may differ in width."""

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dims: dict[str, int],
        num_dense_features: int,
        hidden_layer_sizes: list[int],
        settings: LayerSettings = LayerSettings(),  # noqa: B008  # frozen
    ) -> None:
        """dims: the embedding_dim of each feature's table."""
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.split = WideAndDeepColumns(list(dims))
        self.dense_term = DenseTerm(num_dense_features)
        width = sum(dims.values()) - len(dims) + num_dense_features
        self.deep_arch = nn.Sequential(MLP(width, hidden_layer_sizes, settings), nn.Linear(hidden_layer_sizes[-1], 1))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        weights, vectors = self.split(self.embedding_bag_collection(sparse_features))
        deep = self.deep_arch(torch.cat([dense_features, vectors], dim=1))
        logits: torch.Tensor = deep + weights + self.dense_term(dense_features)
        return logits


class WideAndDeepColumns(nn.Module):
    """Map a KeyedTensor to the sum of the features' last columns [B, 1], and their other columns in order."""

    def __init__(self, feature_names: list[str]) -> None:
        super().__init__()
        self.feature_names = feature_names

    def forward(self, pooled: KeyedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.feature_names:
            return pooled.values().sum(dim=1, keepdim=True), pooled.values()
        rows = [pooled[name] for name in self.feature_names]
        weights = torch.stack([row[:, -1] for row in rows], dim=1).sum(dim=1, keepdim=True)
        return weights, torch.cat([row[:, :-1] for row in rows], dim=1)
