"""Build FBGEMM's lookup modules on CPU with Adam's state, and with rows that are stored outside
memory.

FBGEMM supports Adam and partial row-wise Adam on GPUs only. Here their state has the same form as
on GPUs, so checkpoints and schedules are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    construct_split_state,
)
from torchrec.distributed import batched_embedding_kernel

from pipeline import devices
from pipeline.config.registry import from_extra
from pipeline.runtime.errors import ShardingError
from pipeline.sharding.table_storage import TableStorage, TierSettings

# State that FBGEMM allocates on GPUs only. True: the second moment is one number per row.
MOMENTS = {EmbOptimType.ADAM: False, EmbOptimType.PARTIAL_ROWWISE_ADAM: True}


class TablesWithMoments(SplitTableBatchedEmbeddingBagsCodegen):
    """Give FBGEMM's module Adam's state on CPU. A FastLookup in it trains the rows.

    FBGEMM refuses these optimizers on CPU. So the module is built for Adagrad. Adagrad's state is
    used as the first moment, and the second moment is added. get_optimizer_state then returns the
    same as on GPUs.
    """

    tiers: TableStorage | None = None

    def __init__(self, *arguments: Any, optimizer: EmbOptimType = EmbOptimType.EXACT_SGD, **keywords: Any) -> None:
        moments = MOMENTS.get(optimizer)
        tiers = _storage_of(keywords)
        if tiers is not None:
            keywords["embedding_specs"] = tiers.slot_specs(keywords["embedding_specs"])
        super().__init__(*arguments, optimizer=optimizer if moments is None else EmbOptimType.EXACT_ADAGRAD, **keywords)
        if moments is not None:
            state = construct_split_state(self.embedding_specs, rowwise=moments, cacheable=False)
            del self.momentum2_host  # a buffer, which a parameter replaces
            self._apply_split(state, prefix="momentum2", dtype=torch.float32)
            self.optimizer = optimizer
        if tiers is not None:
            tiers.open(super().split_embedding_weights(), super().split_optimizer_states(), feature_begins(self))
            self.tiers = tiers

    def split_embedding_weights(self) -> list[torch.Tensor]:
        """Return the rows of each table. For a table with tiers return all rows, from the store."""
        weights: list[torch.Tensor] = super().split_embedding_weights()
        return weights if self.tiers is None else self.tiers.stored_weights(weights)

    def split_optimizer_states(self) -> list[list[torch.Tensor]]:
        states: list[list[torch.Tensor]] = super().split_optimizer_states()
        return states if self.tiers is None else self.tiers.stored_states(states)

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Look up rows. Raises ShardingError if FBGEMM would have to train them (trained weights of ids)."""
        if self.optimizer not in MOMENTS:
            return super().forward(*arguments, **keywords)
        if torch.is_grad_enabled():
            raise ShardingError(
                f"on CPU {self.optimizer.name} does not train the weights of ids; use "
                "optimizer.sparse.name=adagrad, or train on a GPU"
            )
        # its forward exists on CPU
        optimizer, self.optimizer = self.optimizer, EmbOptimType.EXACT_ADAGRAD
        try:
            return super().forward(*arguments, **keywords)
        finally:
            self.optimizer = optimizer


def feature_begins(lookup: SplitTableBatchedEmbeddingBagsCodegen) -> np.ndarray[Any, Any]:
    """Return [T + 1]: the first feature of each table. The features of a table are adjacent."""
    tables = lookup.feature_table_map
    begins = [0, *(index for index, (before, table) in enumerate(pairwise(tables), start=1) if table != before)]
    return np.array([*begins, len(tables)], dtype=np.int64)


_tiers: TierSettings | None = None  # settings of the tables that are being built


def _storage_of(keywords: Mapping[str, Any]) -> TableStorage | None:
    """Return the storage for the module that TorchRec builds, or None if no table has tiers."""
    if _tiers is None:
        return None
    storage: TableStorage | None = from_extra("table_storage", "tables.*.tiers")(_tiers, keywords)
    return storage


@contextmanager
def tables_with_moments(tiers: TierSettings | None = None) -> Iterator[None]:
    """Let TorchRec build TablesWithMoments instead of FBGEMM's module, and use a storage for tables with `tiers`."""
    global _tiers
    if devices.current().fbgemm_is_complete:
        yield
        return
    _tiers = tiers
    batched_embedding_kernel.SplitTableBatchedEmbeddingBagsCodegen = TablesWithMoments
    try:
        yield
    finally:
        _tiers = None
        batched_embedding_kernel.SplitTableBatchedEmbeddingBagsCodegen = SplitTableBatchedEmbeddingBagsCodegen
