"""Separate a batch's behaviour sequence, its target and the other features, and join the encoder's
output with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.config.tables import table_name
from pipeline.embeddings.table import COUNT_COLUMNS, COUNT_UNIT


class History(NamedTuple):
    """Hold the inputs of an encoder of histories.

    target [B, Q]. rows [B, L, K], oldest first; the first Q columns are of the same features as the
    target. mask [B, L]: true if the position has an id. others [B, W]: the columns of all features
    that are not sequences.
    """

    target: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor
    others: torch.Tensor


class HistoryInputs(nn.Module):
    """Map a KeyedTensor by feature to a History.

    A position without an id has a row of zeros and is left out of every sum.
    """

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
        # of the first sequence, because all sequences have the same lengths
        counts = blocks[0][:, -COUNT_COLUMNS:].to(torch.int64)
        count = counts[:, :1] * COUNT_UNIT + counts[:, 1:]
        mask = torch.arange(rows[0].shape[1], device=count.device) < count
        target = torch.cat([columns[name] for name in self.targets], dim=1)
        return History(
            target,
            rows[0] if len(rows) == 1 else torch.cat(rows, dim=2),
            mask,
            torch.cat([columns[name] for name in self.others], dim=1) if self.others else target[:, :0],
        )


class HistoryModel(nn.Module):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1].

    `layers` read the dense features, the other features and the output of `encoder`(target, rows,
    mask).
    """

    def __init__(self, embeddings: nn.Module, inputs: HistoryInputs, encoder: nn.Module, layers: nn.Module) -> None:
        super().__init__()
        self.embedding_bag_collection, self.inputs = embeddings, inputs
        self.encoder, self.layers = encoder, layers

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        history = self.inputs(self.embedding_bag_collection(sparse_features))
        interest = self.encoder(history.target, history.rows, history.mask)
        logits: torch.Tensor = self.layers(torch.cat([dense_features, history.others, interest], dim=1))
        return logits


class Encoders(nn.Module):
    """Map a KeyedTensor by feature to [B, W]: the features `others`, and the output of each
    encoder. An encoder is given with its inputs, by name.
    """

    def __init__(self, encoders: dict[str, tuple[HistoryInputs, nn.Module]], others: Sequence[str]) -> None:
        super().__init__()
        self.others = list(others)
        self.inputs = nn.ModuleList(inputs for inputs, _ in encoders.values())
        self.encoders = nn.ModuleDict({table_name(name): encoder for name, (_, encoder) in encoders.items()})

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        columns = pooled.to_dict()
        parts = [columns[name] for name in self.others]
        for inputs, encoder in zip(self.inputs, self.encoders.values(), strict=True):
            history = inputs(pooled)
            parts.append(encoder(history.target, history.rows, history.mask))
        return torch.cat(parts, dim=1)


class SeveralHistories(nn.Module):
    """Compute forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1].

    `encoders` is one module, because TorchRec's pipeline traces the model, but not its parts.
    """

    def __init__(self, embeddings: nn.Module, encoders: Encoders, layers: nn.Module) -> None:
        super().__init__()
        self.embedding_bag_collection, self.encoders, self.layers = embeddings, encoders, layers

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        inputs = self.encoders(self.embedding_bag_collection(sparse_features))
        logits: torch.Tensor = self.layers(torch.cat([dense_features, inputs], dim=1))
        return logits


def ages(mask: torch.Tensor) -> torch.Tensor:
    """Return [B, L] int64: 1 for the newest id of a sequence, 2 for the id before it; below 1 if there is no id."""
    return mask.sum(dim=1, keepdim=True) - torch.arange(mask.shape[1], device=mask.device)
