"""Let FBGEMM's lookups on CPU compute the mean of weighted rows as a sum.

If ids have weights, FBGEMM's mean is the sum of weight * row, divided by the number of ids. On CPU
its forward divides and its backward does not (seen on fbgemm 1.8 and 1.9), so a row of a bag of
three ids would learn three times too fast. A sum with divided weights is the same number, and its
gradient is correct.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

LOOKUPS = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)


def divide_weights_of_means(modules: Iterable[nn.Module]) -> None:
    """Replace the forward of every lookup of means in `modules`."""
    for lookup in (child for module in modules for child in module.modules() if isinstance(child, LOOKUPS)):
        if lookup.pooling_mode == PoolingMode.MEAN:
            lookup.forward = _MeansAsSums(lookup)


class _MeansAsSums:
    """Replace the module's forward(indices [L], offsets [F * B + 1], weights of the ids [L])."""

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
