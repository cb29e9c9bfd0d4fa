"""Represent features as vectors: the rows of tables, and learnt vectors multiplied by dense values."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.models.layers.interaction import PooledRows


class RowsModel(nn.Module):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> over_arch(dense, rows [B,
    F, D]).

    The rows are in the order of `feature_names` under any plan. Without sparse features the rows
    are [B, 0, D].
    """

    def __init__(
        self, embedding_bag_collection: nn.Module, feature_names: list[str], embedding_dim: int, over_arch: nn.Module
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.pooled_rows = PooledRows(feature_names)
        self.over_arch = over_arch
        self._dim = embedding_dim

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        if self.pooled_rows.feature_names:
            rows = self.pooled_rows(self.embedding_bag_collection(sparse_features))
        else:
            rows = dense_features.new_zeros(dense_features.shape[0], 0, self._dim)
        logits: torch.Tensor = self.over_arch(dense_features, rows)
        return logits


class DenseVectors(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to [B, N + F, D]: first learnt vectors times dense values, then rows."""

    def __init__(self, num_dense_features: int, dim: int) -> None:
        super().__init__()
        # Small, because values are not scaled, and large products would dominate the logit.
        weight = torch.empty(num_dense_features, dim)
        self.weight = nn.Parameter(nn.init.normal_(weight, std=0.01)) if num_dense_features else None

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return rows
        return torch.cat([dense.unsqueeze(2) * self.weight, rows], dim=1)


class FeatureInputs(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to (vectors [B, num_vectors, D], inputs [B, width]).

    Dense features are part of the vectors, or their values are part of `inputs` only.
    """

    def __init__(self, num_sparse_features: int, num_dense_features: int, dim: int, dense_as_vectors: bool) -> None:
        super().__init__()
        self.num_dense_features = num_dense_features
        num_scaled = num_dense_features if dense_as_vectors else 0
        self.dense_vectors = DenseVectors(num_scaled, dim)
        self.num_vectors = num_scaled + num_sparse_features
        self.width = self.num_vectors * dim + num_dense_features - num_scaled
        self._adds_values = num_dense_features > num_scaled

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.dense_vectors(dense, rows)
        inputs = vectors.flatten(1)
        return vectors, torch.cat([inputs, dense], dim=1) if self._adds_values else inputs
