"""Exchange ids, pooled rows and gradients without gloo if all CPU ranks are on one host.

TorchRec sends ids and pooled rows through the process group. A single rank keeps its ids without a
copy. Several ranks of one host send the ids and rows of table_wise and column_wise tables through
HostExchange. So no splits have to be exchanged before the ids, because each message contains its
sizes. The numbers, their order and the gradients are the same as TorchRec's. TorchRec still
exchanges batches whose features have different numbers of bags, quantized rows and row-sharded
tables.

DDP copies gradients into buckets, which gloo's threads send; for a small model that takes longer
than the layers. Here each rank sends one message at the end of backward (GradientAverage). InOrder
joins the parts of several shardings directly in the order of the configs. TorchRec joins them in
another order, and the model would copy them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable, ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist, TwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.data.read.batch import ID_DTYPE, LENGTH_DTYPE
from pipeline.devices.cpu.host_exchange import HostExchange
from pipeline.runtime.process.comms_wait import working

COUNT_DTYPE = torch.int64


def skip_id_exchange(input_dists: Iterable[nn.Module]) -> None:
    """Let a collection on one rank keep its ids without an exchange. TrainPipelineSparseDist restores the exchange."""
    for input_dist in input_dists:
        for module in input_dist.modules():
            if isinstance(module, KJTAllToAll):
                module.forward = keep_ids


def keep_ids(features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
    """Return the features unchanged. This function replaces KJTAllToAll.forward."""
    return NoWait(NoWait(features))


def exchange_on_host(tables: ShardedEmbeddingBagCollection, exchange: HostExchange) -> int:
    """Replace the collectives of `tables`, whose input dists must exist. Return the number of
    shardings that changed.

    Quantized embeddings keep TorchRec's collectives and so the requested precision.
    """
    changed = 0
    for index, (ids, pooled) in enumerate(zip(tables._input_dists, tables._output_dists, strict=True)):
        is_plain = isinstance(pooled, TwPooledEmbeddingDist) and pooled._codecs is None
        if is_plain and isinstance(ids, TwSparseFeaturesDist) and ids._dist._pg.size() == exchange.world_size:
            tables._input_dists[index] = IdsOnHost(ids, exchange)
            tables._output_dists[index] = PooledOnHost(pooled, exchange)
            changed += 1
    return changed


class IdsOnHost(nn.Module):
    """Exchange ids: forward(features sorted by rank) -> awaitable of an awaitable of this rank's features."""

    def __init__(self, torchrec_dist: TwSparseFeaturesDist, exchange: HostExchange) -> None:
        super().__init__()
        self._torchrec_dist, self._exchange, self._channel = torchrec_dist, exchange, exchange.new_channel()
        # the features of each rank
        self._bounds = list(pairwise([0, *accumulate(torchrec_dist._dist._splits)]))

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Any]:
        if features.variable_stride_per_key():
            awaitable: Awaitable[Any] = self._torchrec_dist(features)
            return awaitable
        lengths = features.lengths().view(len(features.keys()), -1)
        offsets, weights = features.offset_per_key(), features.weights_or_none()
        parts = []
        for begin, end in self._bounds:
            counts = [end_id - first_id for first_id, end_id in pairwise(offsets[begin : end + 1])]
            head = torch.tensor([lengths.shape[1], *counts], dtype=COUNT_DTYPE)
            ids = slice(offsets[begin], offsets[end])
            part = [head, lengths[begin:end], features.values()[ids]]
            parts.append(part if weights is None else [*part, weights[ids]])
        first, last = self._bounds[self._exchange.rank]
        return _IdsAwaitable(self._exchange, self._channel, parts, list(features.keys()[first:last]))


class _IdsAwaitable(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """Send this rank's ids when created, and read the other ranks' ids in wait()."""

    def __init__(self, exchange: HostExchange, channel: int, parts: list[list[torch.Tensor]], keys: list[str]) -> None:
        super().__init__()
        self._exchange, self._channel, self._local_part, self._keys = exchange, channel, parts[exchange.rank], keys
        self._number = exchange.post(channel, parts)

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        with working():  # the exchange measures its waits itself
            return self._read()

    def _read(self) -> Awaitable[KeyedJaggedTensor]:
        num_features = len(self._keys)
        lengths, values, weights, strides = [], [], [], []
        for message in self._exchange.take(self._channel, self._number):
            if message is None:
                head, *tensors = self._local_part
                stride, *counts = head.tolist()
            else:
                stride, *counts = message.read([1 + num_features], COUNT_DTYPE).tolist()
                tensors = [message.read([num_features, stride], LENGTH_DTYPE), message.read([sum(counts)], ID_DTYPE)]
                if len(self._local_part) == 4:
                    tensors.append(message.read([sum(counts)], self._local_part[3].dtype))
            strides.append(stride)
            lengths.append(tensors[0])
            values.append(tensors[1].split(counts))
            if len(tensors) == 3:
                weights.append(tensors[2].split(counts))
        per_key = [sum(map(len, of_feature)) for of_feature in zip(*values, strict=True)]
        features = KeyedJaggedTensor(
            keys=self._keys,
            values=_by_feature(values, ID_DTYPE),
            weights=_by_feature(weights, self._local_part[3].dtype) if weights else None,
            lengths=torch.cat(lengths, dim=1).view(-1),
            stride=sum(strides),
            length_per_key=per_key,
            offset_per_key=[0, *accumulate(per_key)],
        )
        return _ReceivedIds(features, strides)


def _by_feature(of_ranks: list[tuple[torch.Tensor, ...]], dtype: torch.dtype) -> torch.Tensor:
    """Join the pieces of all ranks, sorted by feature and, within a feature, by rank."""
    pieces = [piece for of_feature in zip(*of_ranks, strict=True) for piece in of_feature]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)


class _ReceivedIds(KJTAllToAllTensorsAwaitable):
    """Hold ids that have arrived, in the type by which TorchRec decides to store batch sizes."""

    def __init__(self, features: KeyedJaggedTensor, strides: list[int]) -> None:
        Awaitable.__init__(self)
        self._features = features
        self._stride_per_rank = strides

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._features


class PooledOnHost(nn.Module):
    """Exchange pooled rows: forward([batch of all ranks, this rank's D]) -> awaitable of [own batch, all D]."""

    def __init__(self, torchrec_dist: TwPooledEmbeddingDist, exchange: HostExchange) -> None:
        super().__init__()
        self._torchrec_dist, self._exchange = torchrec_dist, exchange
        self._dims = list(torchrec_dist._dim_sum_per_rank)
        self._channels = exchange.new_channel(), exchange.new_channel()

    def forward(
        self, pooled: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        if sharding_ctx is not None and sharding_ctx.variable_batch_per_feature:
            awaitable: Awaitable[torch.Tensor] = self._torchrec_dist(pooled, sharding_ctx)
            return awaitable
        sizes = list(sharding_ctx.batch_size_per_rank) if sharding_ctx is not None else []
        if not sizes:
            sizes = [len(pooled) // self._exchange.world_size] * self._exchange.world_size
        received = _PooledAwaitable(_PooledExchange(self._exchange, *self._channels, self._dims, sizes), pooled)
        # join the columns of a table again
        received.callbacks.extend(self._torchrec_dist._callbacks or [])
        return received


@dataclass
class _PooledExchange:
    """Exchange the pooled rows of one batch, and the gradients of these rows in backward."""

    exchange: HostExchange
    forward_channel: int
    backward_channel: int
    dims: list[int]  # columns of each rank
    sizes: list[int]  # samples of each rank
    number: int = 0  # the number of the message that is being exchanged
    # the part that this rank keeps
    local_block: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class _PooledAwaitable(Awaitable[torch.Tensor]):
    """Send this rank's columns when created, and read the other ranks' columns in wait()."""

    def __init__(self, batch: _PooledExchange, pooled: torch.Tensor) -> None:
        super().__init__()
        self._batch = batch
        self._posted = _Post.apply(pooled, batch)

    def _wait_impl(self) -> torch.Tensor:
        with working():
            return _Read.apply(self._posted, self._batch)


class _Post(torch.autograd.Function):
    """Send pooled rows in forward. The backward runs after _Read's backward, and reads the rows' gradients."""

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, batch: _PooledExchange) -> torch.Tensor:
        ctx.batch, ctx.shape = batch, pooled.shape
        # A rank without tables passes an empty tensor.
        blocks = pooled.view(sum(batch.sizes), batch.dims[batch.exchange.rank]).split(batch.sizes)
        batch.local_block = blocks[batch.exchange.rank]
        batch.number = batch.exchange.post(batch.forward_channel, [[block] for block in blocks])
        return pooled.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        batch: _PooledExchange = ctx.batch
        dim = batch.dims[batch.exchange.rank]
        blocks = [
            batch.local_block if message is None else message.read([size, dim], batch.local_block.dtype)
            for size, message in zip(
                batch.sizes, batch.exchange.take(batch.backward_channel, batch.number), strict=True
            )
        ]
        gradient = torch.cat(blocks).view(ctx.shape)
        batch.local_block = torch.empty(0)
        return gradient.div_(batch.exchange.world_size) if get_gradient_division() else gradient, None


class _Read(torch.autograd.Function):
    """Read pooled rows in forward. The backward runs before _Post's backward, and sends the rows' gradients."""

    @staticmethod
    def forward(ctx: Any, posted: torch.Tensor, batch: _PooledExchange) -> torch.Tensor:
        ctx.batch = batch
        size = batch.sizes[batch.exchange.rank]
        blocks = [
            batch.local_block if message is None else message.read([size, dim], batch.local_block.dtype)
            for dim, message in zip(batch.dims, batch.exchange.take(batch.forward_channel, batch.number), strict=True)
        ]
        batch.local_block = torch.empty(0)
        return torch.cat(blocks, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        batch: _PooledExchange = ctx.batch
        blocks = gradient.split(batch.dims, dim=1)
        batch.local_block = blocks[batch.exchange.rank]
        batch.number = batch.exchange.post(batch.backward_channel, [[block] for block in blocks])
        return gradient.new_empty(0), None


BROADCAST_BYTES = 25 << 20  # sent at a time


class GradientAverage:
    """Average the gradients of `parameters` after each backward that reaches any of them.

    Every rank must reach the same parameters. A parameter that no rank reaches has no gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], exchange: HostExchange) -> None:
        """Collective: copy rank 0's parameters to all ranks, as DDP does."""
        world = dist.GroupMember.WORLD
        assert world is not None
        dist._broadcast_coalesced(world, [parameter.detach() for parameter in parameters], BROADCAST_BYTES, 0)
        self._exchange, self._parameters = exchange, list(parameters)
        self._blocks = []
        for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
            of_dtype = [parameter for parameter in parameters if parameter.dtype == dtype]
            self._blocks.append(_Block(of_dtype, exchange.new_channel()))
        self._is_queued = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._queue)

    def _queue(self, _: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._is_queued = False
        with working():  # the exchange measures its waits itself
            for block in self._blocks:
                block.gather()
                block.flat.div_(self._exchange.world_size)
                self._exchange.all_reduce(block.channel, block.flat)


class _Block:
    """Hold the gradients of all parameters of one dtype in one tensor."""

    def __init__(self, parameters: list[nn.Parameter], channel: int) -> None:
        self._parameters, self.channel = parameters, channel
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        self._views = [
            part.view(parameter.shape) for parameter, part in zip(parameters, self.flat.split(sizes), strict=True)
        ]

    def gather(self) -> None:
        """Copy gradients that are not in the block yet into the block. They become views of it."""
        views, gradients = [], []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                views.append(view)
                gradients.append(gradient)
                parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)


class Columns(NamedTuple):
    """Name the columns begin..end of the pooled rows of sharding number `part`."""

    part: int
    begin: int
    end: int


class FeatureOrder:
    """List the features of `tables` in the order of their configs, with their columns in the parts."""

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
    """Return a KeyedTensor as TorchRec's awaitable does, but with the features in `order`."""

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
    """Join parts [B, D of the part] to [B, all D]. Adjacent columns are copied together."""

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
