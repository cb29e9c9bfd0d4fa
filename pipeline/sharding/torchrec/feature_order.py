"""Turn pooled embeddings as a plan has left them into one block in the order of the collection's features.

TorchRec puts the parts of several shardings side by side, one sharding after the other, and whoever wants the features in
their own order copies once more, forward and backward. Here that order is what the parts are put together in.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable, ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor


class FeatureOrder:
    """The features of `tables` in the order of their configs, and the columns of the parts that they lie in."""

    def __init__(self, tables: ShardedEmbeddingBagCollection) -> None:
        places = {}
        for part, sharding in enumerate(tables._embedding_shardings):
            ends = [0, *accumulate(sharding.embedding_dims())]
            for name, begin, end in zip(sharding.embedding_names(), ends[:-1], ends[1:], strict=True):
                places[name] = (part, begin, end)
        wanted = [name for config in tables._embedding_bag_configs for name in config.feature_names]
        self.names = [name for name in wanted if name in places]
        self.dims = [places[name][2] - places[name][1] for name in self.names]
        self.is_complete = len(self.names) == len(tables._embedding_names) == len(set(self.names))
        self.runs: list[tuple[int, int, int]] = []  # (part, first column, end): neighbours are one copy
        for part, begin, end in (places[name] for name in self.names):
            if self.runs and self.runs[-1][0] == part and self.runs[-1][2] == begin:
                begin = self.runs.pop()[1]
            self.runs.append((part, begin, end))


class InOrder(EmbeddingBagCollectionAwaitable):
    """Stands in for TorchRec's awaitable of a KeyedTensor."""

    def __init__(self, theirs: EmbeddingBagCollectionAwaitable, order: FeatureOrder) -> None:
        super().__init__(theirs._awaitables, theirs._embedding_dims, theirs._embedding_names)
        self._order = order

    def _wait_impl(self) -> KeyedTensor:
        parts = [awaitable.wait() for awaitable in self._awaitables]
        values = _Combined.apply(self._order.runs, *parts)  # type: ignore[no-untyped-call]
        return KeyedTensor(self._order.names, self._order.dims, values, key_dim=1)


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runs: list[tuple[int, int, int]], *parts: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.runs, ctx.shapes = runs, [part.shape for part in parts]
        return torch.cat([parts[part][:, begin:end] for part, begin, end in runs], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        pieces = gradient.split([end - begin for _, begin, end in ctx.runs], dim=1)
        gradients = [gradient.new_empty(shape) for shape in ctx.shapes]
        for (part, begin, end), piece in zip(ctx.runs, pieces, strict=True):
            gradients[part][:, begin:end] = piece
        return None, *gradients
