"""Change FBGEMM's lookups: freeze tables, skip the update of a bad batch, divide weighted means on
CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from pipeline.embeddings.table import RowUpdates

LOOKUPS = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)


@contextmanager
def without_updates(model: nn.Module, is_bad: torch.Tensor) -> Iterator[None]:
    """Give FBGEMM's lookups zero gradients in a backward for which `is_bad` [] bool is True.

    The device reads `is_bad` during backward. Gradients are replaced, because NaN times zero is
    NaN.
    """
    zeros: dict[torch.dtype, torch.Tensor] = {}

    def mask(gradient: torch.Tensor) -> torch.Tensor:
        zero = zeros.setdefault(gradient.dtype, torch.zeros((), dtype=gradient.dtype, device=gradient.device))
        return torch.where(is_bad, zero, gradient)

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(mask)

    handles = [each.register_forward_hook(hook) for each in fbgemm_lookups(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fbgemm_lookups(model: nn.Module) -> list[nn.Module]:
    """Return FBGEMM's modules of all sharded tables. TorchRec keeps lookups in a list, which modules() does not enter."""
    sharded = [each for each in model.modules() if isinstance(each, ShardedEmbeddingBagCollection)]
    children = (child for each in sharded for lookup in each._lookups for child in lookup.modules())
    return [child for child in children if isinstance(child, LOOKUPS)]


def freeze(lookups: Iterable[nn.Module], updates: Mapping[str, RowUpdates]) -> None:
    """Let the lookups of frozen tables never change a row. RowUpdates.group puts frozen tables into
    separate lookups. A second call changes nothing."""
    for lookup in lookups:
        whole: Any = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        for kernel, config in zip(whole._emb_modules, whole.grouped_configs, strict=True):
            if not updates[config.embedding_tables[0].name].frozen:
                continue
            tables = kernel.emb_module
            if isinstance(tables, DenseTableBatchedEmbeddingBagsCodegen):
                tables.weights.requires_grad_(False)
            elif not getattr(tables, "is_frozen", False):
                tables.is_frozen, tables.forward = True, _Frozen(tables)


class _Frozen:
    """Replace a lookup's forward. The backward of its pooled rows reaches no table.

    The rows still require gradients, because each rank must run the backward of an exchange of rows
    if one rank does.
    """

    def __init__(self, lookup: nn.Module) -> None:
        self._fbgemm_forward = lookup.forward

    def __call__(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        with torch.no_grad():
            pooled: torch.Tensor = self._fbgemm_forward(*arguments, **keywords)
        return pooled.requires_grad_() if torch.is_grad_enabled() else pooled


def divide_weights_of_means(modules: Iterable[nn.Module]) -> None:
    """Replace the forward of every lookup in `modules` that pools by the mean."""
    for lookup in (child for module in modules for child in module.modules() if isinstance(child, LOOKUPS)):
        if lookup.pooling_mode == PoolingMode.MEAN:
            lookup.forward = _MeansAsSums(lookup)


class _MeansAsSums:
    """Replace the module's forward(indices [L], offsets [F * B + 1], weights of the ids [L]) -> pooled rows."""

    def __init__(self, lookup: nn.Module) -> None:
        self._fbgemm_forward, self._lookup = lookup.forward, lookup

    def __call__(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        *arguments: Any,
        **keywords: Any,
    ) -> torch.Tensor:
        if per_sample_weights is None:
            return self._fbgemm_forward(indices, offsets, None, *arguments, **keywords)
        lengths = offsets.diff()
        shares = (1 / lengths).repeat_interleave(lengths, output_size=len(indices))
        lookup: Any = self._lookup
        lookup.pooling_mode = PoolingMode.SUM
        try:
            weights = per_sample_weights * shares
            return self._fbgemm_forward(indices, offsets, weights, *arguments, **keywords)
        finally:
            lookup.pooling_mode = PoolingMode.MEAN
