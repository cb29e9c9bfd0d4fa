"""Combine pooled embeddings in the order of the collection's features under any plan.

TorchRec concatenates the parts of several shardings, one sharding after the other. A model that
needs the features in the order of the configs copies them again, forward and backward. Here the
parts are joined in that order at once.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable, ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor


class Columns(NamedTuple):
    """Columns begin..end of the pooled rows of sharding number `part`."""

    part: int
    begin: int
    end: int


class FeatureOrder:
    """The features of `tables` in the order of their configs, and the columns of each feature in
    the parts.
    """

    def __init__(self, tables: ShardedEmbeddingBagCollection) -> None:
        columns = {}
        for part, sharding in enumerate(tables._embedding_shardings):
            ends = [0, *accumulate(sharding.embedding_dims())]
            for name, begin, end in zip(sharding.embedding_names(), ends[:-1], ends[1:], strict=True):
                columns[name] = Columns(part, begin, end)
        wanted = [name for config in tables._embedding_bag_configs for name in config.feature_names]
        self.names = [name for name in wanted if name in columns]
        self.dims = [columns[name].end - columns[name].begin for name in self.names]
        self.is_complete = len(self.names) == len(tables._embedding_names) == len(set(self.names))
        self.runs: list[Columns] = []  # adjacent columns are copied together
        for part, begin, end in (columns[name] for name in self.names):
            if self.runs and self.runs[-1].part == part and self.runs[-1].end == begin:
                begin = self.runs.pop().begin
            self.runs.append(Columns(part, begin, end))


class InOrder(EmbeddingBagCollectionAwaitable):
    """TorchRec's awaitable of a KeyedTensor, with the features in `order`."""

    def __init__(self, torchrec_awaitable: EmbeddingBagCollectionAwaitable, order: FeatureOrder) -> None:
        super().__init__(
            torchrec_awaitable._awaitables, torchrec_awaitable._embedding_dims, torchrec_awaitable._embedding_names
        )
        self._order = order

    def _wait_impl(self) -> KeyedTensor:
        parts = [awaitable.wait() for awaitable in self._awaitables]
        values = _Combined.apply(self._order.runs, *parts)
        return KeyedTensor(self._order.names, self._order.dims, values, key_dim=1)


class _Combined(torch.autograd.Function):
    """Join [B, D of each part] to [B, all D], run by run."""

    @staticmethod
    def forward(ctx: Any, runs: list[Columns], *parts: torch.Tensor) -> torch.Tensor:
        ctx.runs, ctx.shapes = runs, [part.shape for part in parts]
        return torch.cat([parts[part][:, begin:end] for part, begin, end in runs], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pieces = gradient.split([run.end - run.begin for run in ctx.runs], dim=1)
        gradients = [gradient.new_empty(shape) for shape in ctx.shapes]
        for (part, begin, end), piece in zip(ctx.runs, pieces, strict=True):
            gradients[part][:, begin:end] = piece
        return None, *gradients
