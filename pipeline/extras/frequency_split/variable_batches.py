"""Run lookups whose features differ in their number of bags, by padding features with empty bags.

A KeyedJaggedTensor whose features have fewer bags than samples (TorchRec's "variable batch per
feature") saves the bytes of the omitted bags. TorchRec's collectives support such features
everywhere, but FBGEMM's kernels do not: the dense kernel ignores them on CPU, and on GPUs Adagrad,
LAMB and partial row-wise Adam refuse them. After padding, the kernels get equal batches. TorchRec
has no alternative, so the padding also runs with sharding.fast_cpu=false.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable, NoWait, QuantizedCommCodec, QuantizedCommCodecs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.runtime.process.comms_wait import waiting

# int8 communication needs multiples of 32 numbers, and a shard of a row has at least 4
MULTIPLE = 8
# The optimizers of this package that FBGEMM's CUDA kernels combine with variable batches
# (_generate_vbe_metadata).
WITH_VARIABLE_BATCHES = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM)

# They reduce within a host, then exchange between hosts.
WITHIN_HOSTS = (TwRwPooledEmbeddingDist, GridPooledEmbeddingDist)


def leave_out_empty_bags(features: KeyedJaggedTensor, names: Collection[str]) -> KeyedJaggedTensor:
    """For each feature in `names` keep one empty bag and then the bags with ids, and pad their
    number to a multiple of MULTIPLE. All ids are kept.

    A bag without ids has a pooled row of zeros, but TorchRec sends it and its gradient like any other. A
    KeyedJaggedTensor may have fewer bags of a feature than samples, and map samples to bags (TorchRec's "variable
    batch per feature"): all empty bags map to the first one. `lengths` become flat [sum of all features' bags];
    `inverse_indices` [keys, samples] hold the bag of each sample.
    """
    keys, num_samples = features.keys(), features.stride()
    lengths = features.lengths().view(len(keys), num_samples)
    every = torch.arange(num_samples, device=lengths.device)
    parts, bags = [], []
    for key, own in zip(keys, lengths, strict=True):
        if key in names:
            filled = own > 0
            kept = own[filled]
            parts.append(torch.cat([own.new_zeros(1), kept, own.new_zeros(-(len(kept) + 1) % MULTIPLE)]))
            bags.append(filled.cumsum(0) * filled)
        else:
            parts.append(own)
            bags.append(every)
    return KeyedJaggedTensor(
        keys,
        features.values(),
        features.weights_or_none(),
        lengths=torch.cat(parts),
        stride_per_key_per_rank=[[len(part)] for part in parts],
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
        inverse_indices=(keys, torch.stack(bags)),
    )


def accept_variable_batches(lookups: Iterable[nn.Module], output_dists: Iterable[nn.Module]) -> None:
    """Replace the forward of TorchRec's grouped lookups by a forward that pads, if FBGEMM needs
    equal numbers of bags. On gloo, whose all-gather needs equal batches, also replace the output
    dists.
    """
    for lookup in lookups:
        inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        kernels: Iterable[Any] = inner._emb_modules  # type: ignore[assignment]
        if not all(takes_variable_batches(kernel.emb_module) for kernel in kernels):
            inner.forward = _PaddedLookup(inner)
    for output_dist in output_dists:
        if isinstance(output_dist, RwPooledEmbeddingDist) and output_dist._pg.name() == "gloo":
            output_dist._create_output_dist_module = partial(_create_output_dist_module, output_dist)
        elif isinstance(output_dist, WITHIN_HOSTS) and output_dist._intra_pg.name() == "gloo":
            output_dist._create_output_dist_modules = partial(_create_output_dist_modules, output_dist)


def takes_variable_batches(fbgemm: nn.Module) -> bool:
    """Return whether this module of FBGEMM can look up features that differ in their number of
    bags.
    """
    if fbgemm.use_cpu:
        return False
    # the dense kernel has no optimizer
    return getattr(fbgemm, "optimizer", None) in (None, *WITH_VARIABLE_BATCHES)


class _PaddedLookup:
    """Replace the module's forward(features). Return [B, all features' D], or only the existing
    bags as a flat tensor.
    """

    def __init__(self, lookup: nn.Module) -> None:
        self._torchrec_forward = lookup.forward
        configs: list[GroupedEmbeddingConfig] = lookup.grouped_configs  # type: ignore[assignment]  # a plain attribute
        self._dims = [dim for config in configs for dim in config.embedding_dims()]

    def __call__(self, features: KeyedJaggedTensor) -> torch.Tensor:
        if not features.variable_stride_per_key() or not self._dims:
            return self._torchrec_forward(features)
        counts = features.stride_per_key_per_rank()
        pooled = self._torchrec_forward(padded(features))
        return _Flattened.apply(pooled, counts, self._dims)


def padded(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Add empty bags at the end of each feature, so that all features have as many bags as the
    longest. The ids stay the same.
    """
    counts = features.stride_per_key()
    lengths = features.lengths()
    even = lengths.new_zeros(len(counts), max(counts))
    for row, part in zip(even, lengths.split(counts), strict=True):
        row[: len(part)] = part
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        features.weights_or_none(),
        lengths=even.view(-1),
        stride=max(counts),
        # on a GPU, computing them would wait for it
        length_per_key=features.length_per_key_or_none(),
        offset_per_key=features.offset_per_key_or_none(),
    )


class _Flattened(torch.autograd.Function):
    """Map [max B, sum of D] to a flat tensor. It has, for each rank and each feature, `counts[feature][rank]` bags."""

    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, counts: list[list[int]], dims: list[int]) -> torch.Tensor:
        ctx.shape, ctx.pieces = pooled.shape, _pieces(counts, dims)
        flat = pooled.new_empty(sum(sum(count) * dim for count, dim in zip(counts, dims, strict=True)))
        for rows, columns, span in ctx.pieces:
            block = pooled[rows, columns]
            flat[span].view(block.shape).copy_(block)
        return flat

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        pooled = gradient.new_zeros(ctx.shape)
        for rows, columns, span in ctx.pieces:
            block = pooled[rows, columns]
            block.copy_(gradient[span].view(block.shape))
        return pooled, None, None


def _pieces(counts: list[list[int]], dims: list[int]) -> list[tuple[slice, slice, slice]]:
    """Return the rows and columns of each block, and the block's span in the flat tensor.

    A feature's bags are sorted by rank.
    """
    columns = [0, *accumulate(dims)]
    first_rows = [[0, *accumulate(of_ranks)] for of_ranks in counts]
    pieces, begin = [], 0
    for rank in range(len(counts[0])):
        for feature, dim in enumerate(dims):
            rows = slice(first_rows[feature][rank], first_rows[feature][rank + 1])
            size = (rows.stop - rows.start) * dim
            pieces.append((rows, slice(columns[feature], columns[feature + 1]), slice(begin, begin + size)))
            begin += size
    return pieces


def in_order_of(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """Return `features` with the inverse indices in the order of `names`, the order of the sharded
    tables.

    TorchRec sorts features into that order. When it divides MEAN bags, it assumes that the inverse
    indices are sorted too.
    """
    keys, bags = features.inverse_indices()
    if len(keys) != len(names):  # TorchRec then looks them up by name
        return features
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        features.weights_or_none(),
        lengths=features.lengths(),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
        length_per_key=features.length_per_key_or_none(),
        offset_per_key=features.offset_per_key_or_none(),
        inverse_indices=(names, bags[[keys.index(name) for name in names]]),
    )


def _create_output_dist_module(rows: RwPooledEmbeddingDist, context: EmbeddingShardingContext | None = None) -> None:
    if context is not None and context.variable_batch_per_feature:
        rows._dist = _VariableReduceScatter(rows._pg, rows._codecs)
    else:
        RwPooledEmbeddingDist._create_output_dist_module(rows, context)


def _create_output_dist_modules(
    rows: TwRwPooledEmbeddingDist | GridPooledEmbeddingDist, context: EmbeddingShardingContext | None = None
) -> None:
    type(rows)._create_output_dist_modules(rows, context)
    if rows._variable_intra_dist is not None:
        rows._variable_intra_dist = _VariableReduceScatter(rows._intra_pg, rows._intra_codecs)


class _VariableReduceScatter(nn.Module):
    """Replace VariableBatchPooledEmbeddingsReduceScatter by all-to-alls that send the same number of bytes."""

    def __init__(self, group: dist.ProcessGroup, codecs: QuantizedCommCodecs | None) -> None:
        super().__init__()
        self._group, self._codecs = group, codecs

    def forward(
        self,
        local_embs: torch.Tensor,
        batch_size_per_rank_per_feature: list[list[int]],
        embedding_dims: list[int],
    ) -> Awaitable[torch.Tensor]:
        """Collective: map flat partial sums of every rank's bags to flat sums of this
        rank's bags.
        """
        sizes = [
            sum(count * dim for count, dim in zip(counts, embedding_dims, strict=True))
            for counts in batch_size_per_rank_per_feature
        ] or [0] * dist.get_world_size(self._group)  # a host without tables of this kind
        return NoWait(_SumScattered.apply(local_embs, sizes, self._group, self._codecs))


class _SumScattered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        partial_sums: torch.Tensor,
        sizes: list[int],
        group: dist.ProcessGroup,
        codecs: QuantizedCommCodecs | None,
    ) -> torch.Tensor:
        ctx.sizes, ctx.group, ctx.codecs = sizes, group, codecs
        received = [sizes[dist.get_rank(group)]] * len(sizes)
        return (
            _exchange(partial_sums, sizes, received, group, codecs.forward if codecs else None)
            .view(len(sizes), received[0])
            .sum(0)
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent = [len(gradient)] * len(ctx.sizes)
        spread = _exchange(
            gradient.repeat(len(sent)), sent, ctx.sizes, ctx.group, ctx.codecs.backward if ctx.codecs else None
        )
        return spread / len(sent) if get_gradient_division() else spread, None, None, None


def _exchange(
    values: torch.Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    codec: QuantizedCommCodec[Any] | None,
) -> torch.Tensor:
    encoded = codec.encode(values) if codec else values
    arrived = encoded.new_empty(sum(received))
    with waiting():
        dist.all_to_all_single(arrived, encoded.contiguous(), received, sent, group=group)
    decoded: torch.Tensor = codec.decode(arrived) if codec else arrived
    return decoded
