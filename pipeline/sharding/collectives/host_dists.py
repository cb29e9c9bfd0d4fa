"""Turn TorchRec's all-to-alls of tables that lie whole, or by columns, on ranks of one host into pipeline.sharding.collectives.host_exchange's.

Ids go ahead of their step without an exchange of splits: a message tells its own sizes. Numbers, order and autograd are
TorchRec's; batches whose features have numbers of bags of their own still go TorchRec's way.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist, TwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.read.batch import ID_DTYPE, LENGTH_DTYPE
from pipeline.sharding.collectives.comms_wait import working
from pipeline.sharding.collectives.host_exchange import HostExchange

COUNT_DTYPE = torch.int64


def exchange_on_host(tables: ShardedEmbeddingBagCollection, exchange: HostExchange) -> int:
    """Replace the collectives of `tables`, input dists included; how many shardings have changed.

    Quantized embeddings keep TorchRec's, so that what is asked for is what is trained with.
    """
    changed = 0
    for index, (ids, pooled) in enumerate(zip(tables._input_dists, tables._output_dists, strict=True)):
        plain = isinstance(pooled, TwPooledEmbeddingDist) and pooled._codecs is None
        if plain and isinstance(ids, TwSparseFeaturesDist) and ids._dist._pg.size() == exchange.world_size:
            tables._input_dists[index] = _IdsOnHost(ids, exchange)
            tables._output_dists[index] = _PooledOnHost(pooled, exchange)
            changed += 1
    return changed


class _IdsOnHost(nn.Module):
    """forward(features, those of rank 0 first) -> awaitable of an awaitable of this rank's features of all ranks."""

    def __init__(self, theirs: TwSparseFeaturesDist, exchange: HostExchange) -> None:
        super().__init__()
        self._theirs, self._exchange, self._channel = theirs, exchange, exchange.new_channel()
        ends = [0, *accumulate(theirs._dist._splits)]
        self._bounds = list(pairwise(ends))

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Any]:
        if features.variable_stride_per_key():
            awaitable: Awaitable[Any] = self._theirs(features)
            return awaitable
        lengths = features.lengths().view(len(features.keys()), -1)
        offsets, weights = features.offset_per_key(), features.weights_or_none()
        parts = []
        for begin, end in self._bounds:
            counts = [
                after - before for before, after in zip(offsets[begin:end], offsets[begin + 1 : end + 1], strict=True)
            ]
            head = torch.tensor([lengths.shape[1], *counts], dtype=COUNT_DTYPE)
            ids = slice(offsets[begin], offsets[end])
            part = [head, lengths[begin:end], features.values()[ids]]
            parts.append(part if weights is None else [*part, weights[ids]])
        first, last = self._bounds[self._exchange.rank]
        return _Sent(self._exchange, self._channel, parts, list(features.keys()[first:last]))


class _Sent(Awaitable[Awaitable[KeyedJaggedTensor]]):
    def __init__(self, exchange: HostExchange, channel: int, parts: list[list[torch.Tensor]], keys: list[str]) -> None:
        super().__init__()
        self._exchange, self._channel, self._own, self._keys = exchange, channel, parts[exchange.rank], keys
        self._number = exchange.post(channel, parts)

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        with working():  # the exchange counts its own waits
            return self._read()

    def _read(self) -> Awaitable[KeyedJaggedTensor]:
        num_features = len(self._keys)
        lengths, values, weights, strides = [], [], [], []
        for message in self._exchange.take(self._channel, self._number):
            if message is None:
                head, *tensors = self._own
                stride, *counts = head.tolist()
            else:
                stride, *counts = message.read([1 + num_features], COUNT_DTYPE).tolist()
                tensors = [
                    message.read([num_features, stride], LENGTH_DTYPE), message.read([sum(counts)], ID_DTYPE)
                ]  # fmt: skip
                if len(self._own) == 4:
                    tensors.append(message.read([sum(counts)], self._own[3].dtype))
            strides.append(stride)
            lengths.append(tensors[0])
            values.append(tensors[1].split(counts))
            if len(tensors) == 3:
                weights.append(tensors[2].split(counts))
        per_key = [sum(map(len, of_feature)) for of_feature in zip(*values, strict=True)]
        features = KeyedJaggedTensor(
            keys=self._keys,
            values=_by_feature(values, ID_DTYPE),
            weights=_by_feature(weights, self._own[3].dtype) if weights else None,
            lengths=torch.cat(lengths, dim=1).view(-1),
            stride=sum(strides),
            length_per_key=per_key,
            offset_per_key=[0, *accumulate(per_key)],
        )
        return _Arrived(features, strides)


def _by_feature(of_ranks: list[tuple[torch.Tensor, ...]], dtype: torch.dtype) -> torch.Tensor:
    """Feature by feature, in each the ranks in order."""
    pieces = [piece for of_feature in zip(*of_ranks, strict=True) for piece in of_feature]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)


class _Arrived(KJTAllToAllTensorsAwaitable):
    """Of the type by which TorchRec knows that it has batch sizes to remember."""

    def __init__(self, features: KeyedJaggedTensor, strides: list[int]) -> None:
        Awaitable.__init__(self)
        self._features = features
        self._stride_per_rank = strides

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._features


class _PooledOnHost(nn.Module):
    """forward(pooled [all ranks' B, this rank's D]) -> awaitable of [B, all ranks' D]."""

    def __init__(self, theirs: TwPooledEmbeddingDist, exchange: HostExchange) -> None:
        super().__init__()
        self._theirs, self._exchange = theirs, exchange
        self._dims = list(theirs._dim_sum_per_rank)
        self._channels = exchange.new_channel(), exchange.new_channel()

    def forward(
        self, pooled: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        if sharding_ctx is not None and sharding_ctx.variable_batch_per_feature:
            awaitable: Awaitable[torch.Tensor] = self._theirs(pooled, sharding_ctx)
            return awaitable
        sizes = list(sharding_ctx.batch_size_per_rank) if sharding_ctx is not None else []
        if not sizes:
            sizes = [len(pooled) // self._exchange.world_size] * self._exchange.world_size
        arriving = _Pooled(_Way(self._exchange, self._channels, self._dims, sizes), pooled)
        arriving.callbacks.extend(self._theirs._callbacks or [])  # columns back into their tables
        return arriving


class _Way:
    """What the two halves of an exchange share, there and back."""

    def __init__(self, exchange: HostExchange, channels: tuple[int, int], dims: list[int], sizes: list[int]) -> None:
        self.forth, self.back = channels
        self.exchange, self.dims, self.sizes = exchange, dims, sizes
        self.number = 0
        self.kept = torch.empty(0)  # this rank's part for itself


class _Pooled(Awaitable[torch.Tensor]):
    def __init__(self, way: _Way, pooled: torch.Tensor) -> None:
        super().__init__()
        self._way = way
        self._sent = _Send.apply(pooled, way)  # type: ignore[no-untyped-call]

    def _wait_impl(self) -> torch.Tensor:
        with working():
            return _Receive.apply(self._sent, self._way)  # type: ignore[no-any-return,no-untyped-call]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, way: _Way) -> torch.Tensor:  # type: ignore[override]
        ctx.way, ctx.shape = way, pooled.shape
        # A rank without tables hands in an empty tensor.
        blocks = pooled.view(sum(way.sizes), way.dims[way.exchange.rank]).split(way.sizes)
        way.kept = blocks[way.exchange.rank]
        way.number = way.exchange.post(way.forth, [[block] for block in blocks])
        return pooled.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        way, dim = ctx.way, ctx.way.dims[ctx.way.exchange.rank]
        blocks = [
            way.kept if message is None else message.read([size, dim], way.kept.dtype)
            for size, message in zip(way.sizes, way.exchange.take(way.back, way.number), strict=True)
        ]
        gradient = torch.cat(blocks).view(ctx.shape)
        way.kept = torch.empty(0)
        return gradient.div_(way.exchange.world_size) if get_gradient_division() else gradient, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, way: _Way) -> torch.Tensor:  # type: ignore[override]
        ctx.way = way
        size = way.sizes[way.exchange.rank]
        blocks = [
            way.kept if message is None else message.read([size, dim], way.kept.dtype)
            for dim, message in zip(way.dims, way.exchange.take(way.forth, way.number), strict=True)
        ]
        way.kept = torch.empty(0)
        return torch.cat(blocks, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        way = ctx.way
        blocks = gradient.split(way.dims, dim=1)
        way.kept = blocks[way.exchange.rank]
        way.number = way.exchange.post(way.back, [[block] for block in blocks])
        return gradient.new_empty(0), None
