"""Take a batch's behaviour sequence, its target and all other features apart, and join what an encoder makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.embeddings.positions import COUNT_COLUMNS, COUNT_UNIT


class History(NamedTuple):
    """target [B, Q]; rows [B, L, K], the first Q columns of which are of the target's features, oldest first; mask [B, L],
    true where there is an id; others [B, W]: the columns of all features that are no sequences."""

    target: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor
    others: torch.Tensor


class HistoryInputs(nn.Module):
    """KeyedTensor by feature -> History. A sequence's rows are zeros where there is no id, and no sum has them."""

    def __init__(
        self, sequences: Sequence[str], targets: Sequence[str], others: Sequence[str], dims: dict[str, int]
    ) -> None:
        super().__init__()
        self.sequences, self.targets, self.others = list(sequences), list(targets), list(others)
        self._dims = [dims[name] for name in sequences]
        self.target_width = sum(dims[name] for name in targets)
        self.row_width, self.other_width = sum(self._dims), sum(dims[name] for name in others)

    def forward(self, pooled: KeyedTensor) -> History:
        columns = pooled.to_dict()
        blocks = [columns[name] for name in self.sequences]
        rows = [
            block[:, :-COUNT_COLUMNS].unflatten(1, (-1, dim)) for block, dim in zip(blocks, self._dims, strict=True)
        ]
        counts = blocks[0][:, -COUNT_COLUMNS:].to(torch.int64)  # of the first: the others are as long
        count = counts[:, :1] * COUNT_UNIT + counts[:, 1:]
        mask = torch.arange(rows[0].shape[1], device=count.device) < count
        return History(
            torch.cat([columns[name] for name in self.targets], dim=1),
            rows[0] if len(rows) == 1 else torch.cat(rows, dim=2),
            mask,
            torch.cat([columns[name] for name in self.others], dim=1),
        )


class HistoryModel(nn.Module):
    """forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]: `layers` over dense features, all others,
    and what `encoder`(target, rows, mask) makes of the sequence."""

    def __init__(self, embeddings: nn.Module, inputs: HistoryInputs, encoder: nn.Module, layers: nn.Module) -> None:
        super().__init__()
        self.embedding_bag_collection, self.inputs = embeddings, inputs
        self.encoder, self.layers = encoder, layers

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        history = self.inputs(self.embedding_bag_collection(sparse_features))
        interest = self.encoder(history.target, history.rows, history.mask)
        logits: torch.Tensor = self.layers(torch.cat([dense_features, history.others, interest], dim=1))
        return logits


def ages(mask: torch.Tensor) -> torch.Tensor:
    """[B, L] int64: 1 for the newest id of a sequence, 2 for the one before; below 1 where there is none."""
    return mask.sum(dim=1, keepdim=True) - torch.arange(mask.shape[1], device=mask.device)
