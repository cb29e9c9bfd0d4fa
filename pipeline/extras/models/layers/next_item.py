"""Define layers that predict the next item of a sequence at each of its positions (SASRec, HSTU)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.embeddings.table import COUNT_COLUMNS, COUNT_UNIT

NUM_LENGTHS = 8  # parts of a batch, by the length of the history


class NextItem(nn.Module):
    """Compute forward(dense_features, sparse_features) -> (users, items, sampled), whose dot products
    rank items.

    users: [B, L + 1, D] in training, where the vector at position k is computed from the first k
    items of the history; otherwise [B, D] from the complete history. items: [B, L + 1, D], the items
    of the history and after them the row's item. sampled: [S, D], the items of further rows in
    sparse_features (data.read.batch.ExtraRows). `prediction` is one module, because TorchRec's
    pipeline traces the model, but not its parts.
    """

    def __init__(self, embeddings: nn.Module, prediction: NextItemLayers) -> None:
        super().__init__()
        self.embedding_bag_collection, self.prediction = embeddings, prediction
        self._item, self._normalize = prediction.item, prediction.normalize

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pooled = self.embedding_bag_collection(sparse_features)
        vectors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.prediction(pooled, dense_features)
        return vectors

    def user_vectors(self, dense_features: torch.Tensor, pooled: KeyedTensor) -> torch.Tensor:
        """Return users [B, D]. `pooled` may lack the item."""
        return self.prediction.users(pooled)

    def item_vectors(self, dense_features: torch.Tensor, pooled: KeyedTensor) -> torch.Tensor:
        """Return items [B, D]: the rows of the table."""
        rows = pooled[self._item]
        return F.normalize(rows, dim=1) if self._normalize else rows


class NextItemLayers(nn.Module):
    """Map a KeyedTensor with a history and an item to the outputs of NextItem.

    A learnt vector is before the first item, so that an empty history has a vector too. Position k
    is the same for all lengths. Each block takes (values [B, L + 1, D], ages [1, L + 1], seen [1, L
    + 1, L + 1]). A position sees itself and older positions, so padding after the newest item
    changes nothing. learnt_positions: add a vector for each position, for blocks that do not use
    ages.
    """

    def __init__(
        self,
        history: str,
        item: str,
        dim: int,
        num_positions: int,
        blocks: list[nn.Module],
        learnt_positions: bool,
        normalize: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.history, self.item, self.normalize = history, item, normalize
        self._dim = dim
        self.start = nn.Parameter(nn.init.normal_(torch.empty(dim), std=0.02))
        positions = torch.empty(num_positions + 1, dim)
        self.positions = nn.Parameter(nn.init.normal_(positions, std=0.02)) if learnt_positions else None
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, pooled: KeyedTensor, dense_features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dense_features: [B, num_dense], only for B."""
        size = len(dense_features)
        rows, count = (part[:size] for part in self._history(pooled))
        own, sampled = pooled[self.item].split([size, len(pooled[self.item]) - size])
        items = F.pad(rows, (0, 0, 0, 1)).scatter(1, self._at(count), own.unsqueeze(1))
        users = self._by_length(rows, count)
        if not self.training:
            users = self._newest(users, count)
        if self.normalize:
            items, sampled = F.normalize(items, dim=2), F.normalize(sampled, dim=1)
        return users, items, sampled

    def users(self, pooled: KeyedTensor) -> torch.Tensor:
        """Return [B, D], from the complete history."""
        rows, count = self._history(pooled)
        return self._newest(self._every(rows), count)

    def _history(self, pooled: KeyedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the history [B, L, D], oldest first, and the number of its items [B]."""
        columns = pooled[self.history]
        counts = columns[:, -COUNT_COLUMNS:].to(torch.int64)
        return columns[:, :-COUNT_COLUMNS].unflatten(1, (-1, self._dim)), counts[:, 0] * COUNT_UNIT + counts[:, 1]

    def _by_length(self, rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return users [B, L + 1, D], zeros after the newest item. Histories of similar lengths are
        computed together, because most histories are much shorter than L.
        """
        order = count.argsort(stable=True)
        parts = order.tensor_split(NUM_LENGTHS)
        longest = [count[part[-1:]].sum() for part in parts]
        users = [
            F.pad(self._every(rows[part, :end]), (0, 0, 0, rows.shape[1] - end))
            for part, end in zip(parts, torch.stack(longest).tolist(), strict=True)
        ]
        return torch.cat(users)[order.argsort()]

    def _every(self, rows: torch.Tensor) -> torch.Tensor:
        """Return users [B, L + 1, D]."""
        values = torch.cat([self.start.expand(rows.shape[0], 1, -1), rows * math.sqrt(self._dim)], dim=1)
        length = values.shape[1]
        if self.positions is not None:
            values = values + self.positions[:length]
        values = self.dropout(values)
        age = torch.arange(length, device=values.device).flip(0)
        seen = age.unsqueeze(0) >= age.unsqueeze(1)  # [seeing position, seen position]
        for block in self.blocks:
            values = block(values, age.unsqueeze(0), seen.unsqueeze(0))
        users = self.norm(values)
        return F.normalize(users, dim=2) if self.normalize else users

    def _at(self, count: torch.Tensor) -> torch.Tensor:
        """Return the index [B, 1, D] of the position after the newest item."""
        return count.view(-1, 1, 1).expand(-1, 1, self._dim)

    def _newest(self, users: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return users.gather(1, self._at(count)).squeeze(1)
