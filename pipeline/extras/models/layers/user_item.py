"""Compute the logit of a click from a user's and an item's row: matrix factorization, and NCF's
GMF, MLP and NeuMF.
"""

from __future__ import annotations

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.config.model import LayerSettings
from pipeline.models.layers.mlp import MLP


class UserItemModel(nn.Module):
    """Compute forward(dense_features [B, any], sparse_features) -> logits [B, 1] = over_arch(user's
    row, item's row).
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        user_feature: str,
        item_feature: str,
        over_arch: nn.Module,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.rows = UserAndItemRows(user_feature, item_feature)
        self.over_arch = over_arch

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        users, items = self.rows(self.embedding_bag_collection(sparse_features))
        logits: torch.Tensor = self.over_arch(users, items)
        return logits


class UserAndItemRows(nn.Module):
    """Map a KeyedTensor to (users [B, D], items [B, D]).

    The plan may order the columns differently.
    """

    def __init__(self, user_feature: str, item_feature: str) -> None:
        super().__init__()
        self._user, self._item = user_feature, item_feature

    def forward(self, pooled: KeyedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pooled[self._user], pooled[self._item]


class BiasedDot(nn.Module):
    """Map users, items [B, D + 1] to u . i + b_u + b_i + b [B, 1].

    The last column of a row is its bias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        dots = (users[:, :-1] * items[:, :-1]).sum(dim=1, keepdim=True)
        return dots + users[:, -1:] + items[:, -1:] + self.bias


class NeuralFiltering(nn.Module):
    """Map users, items [B, D] to [B, 1] by GMF over the first `gmf_columns` columns, an MLP over
    the other columns, and one layer over both results.

    Source: arXiv 1708.05031, section 3.4. If GMF has all columns there is no MLP, and if it has
    none there is only the MLP.
    """

    def __init__(
        self, embedding_dim: int, gmf_columns: int, mlp_layer_sizes: list[int], settings: LayerSettings
    ) -> None:
        super().__init__()
        self._gmf_columns = gmf_columns
        mlp_columns = embedding_dim - gmf_columns
        self.mlp = MLP(2 * mlp_columns, mlp_layer_sizes, settings) if mlp_columns else None
        self.last = nn.Linear(gmf_columns + (mlp_layer_sizes[-1] if mlp_columns else 0), 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        end = self._gmf_columns
        parts = [users[:, :end] * items[:, :end]]
        if self.mlp is not None:
            parts.append(self.mlp(torch.cat([users[:, end:], items[:, end:]], dim=1)))
        logits: torch.Tensor = self.last(torch.cat(parts, dim=1))
        return logits
