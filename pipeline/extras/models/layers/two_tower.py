"""Define two towers: vectors of users and items whose dot product ranks items for a user (Yi et
al., RecSys 2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.config.model import LayerSettings
from pipeline.models.layers.mlp import MLP


class TwoTower(nn.Module):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> (users [B, D], items [B,
    D]).

    sparse_features and items may have more than B rows (training.readers.extra_rows_of).
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dims: dict[str, int],
        user_features: list[str],
        item_features: list[str],
        user_layer_sizes: list[int],
        item_layer_sizes: list[int],
        num_dense_features: int,
        normalize: bool,
        settings: LayerSettings = LayerSettings(),  # noqa: B008  # frozen
    ) -> None:
        """dims: the embedding_dim of each feature's table.

        Dense features are inputs of the user's tower.
        """
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.user_columns, self.item_columns = Columns(user_features), Columns(item_features)
        user_width = sum(dims[name] for name in user_features) + num_dense_features
        self.user_tower = Tower(user_width, user_layer_sizes, normalize, settings)
        self.item_tower = Tower(sum(dims[name] for name in item_features), item_layer_sizes, normalize, settings)

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.embedding_bag_collection(sparse_features)
        return self.user_vectors(dense_features, pooled), self.item_vectors(dense_features, pooled)

    def user_vectors(self, dense_features: torch.Tensor, pooled: KeyedTensor) -> torch.Tensor:
        """Return users [B, D] from the user's features alone. `pooled` may lack the other
        features.
        """
        columns = self.user_columns(pooled)[: dense_features.shape[0]]
        vectors: torch.Tensor = self.user_tower(torch.cat([dense_features, columns], dim=1))
        return vectors

    def item_vectors(self, dense_features: torch.Tensor, pooled: KeyedTensor) -> torch.Tensor:
        """Return items [B, D] from the item's features alone. Dense features belong to the user."""
        vectors: torch.Tensor = self.item_tower(self.item_columns(pooled))
        return vectors


class Columns(nn.Module):
    """Map a KeyedTensor to [B, sum of dims] of `feature_names` in their order.

    The plan may order the columns differently.
    """

    def __init__(self, feature_names: list[str]) -> None:
        super().__init__()
        self.feature_names = list(feature_names)

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        return torch.cat([pooled[name] for name in self.feature_names], dim=1)


class Tower(nn.Module):
    """Map [B, width] to [B, layer_sizes[-1]].

    The last layer is linear. `normalize`: scale vectors to length 1, so that scores are cosines.
    """

    def __init__(self, width: int, layer_sizes: list[int], normalize: bool, settings: LayerSettings) -> None:
        super().__init__()
        *hidden, last = layer_sizes
        layers: list[nn.Module] = [MLP(width, hidden, settings)] if hidden else []
        self.layers = nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else width, last))
        self._normalize = normalize

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.layers(features)
        return F.normalize(vectors, dim=1) if self._normalize else vectors
