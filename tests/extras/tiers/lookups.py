"""Lookup modules of the same tables, in memory and in tiers, and ids to train them by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

from pipeline.checkpoint.stored_rows import UNIFORM, FirstWeights
from pipeline.extras.tiers.tiered_lookup import ShardRows
from pipeline.sharding.table_storage import TierSettings
from pipeline.sharding.torchrec.cpu_tables import FastLookup, speed_up_cpu_tables
from pipeline.sharding.torchrec.table_moments import TablesWithMoments, tables_with_moments

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
}
BATCH = 24
FEATURES = (0, 1, 1, 2)  # the table of each


@dataclass(frozen=True)
class Shape:
    """Tables a, b and c; b has two features, and c may lie in memory beside tiers."""

    rows: tuple[int, ...] = (400, 700, 60)
    dims: tuple[int, ...] = (8, 20, 4)


def build(
    optimizer: str, shape: Shape, slots: Mapping[str, float], folder: Any, heads: Mapping[str, float] | None = None
) -> TablesWithMoments:
    """By `slots` in tiers, or in memory where there are none; first weights are the same."""
    names = ["a", "b", "c"]
    settings = TierSettings(slots, str(folder), heads=heads or {}) if slots else None
    specs = [
        (rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in zip(shape.rows, shape.dims, strict=True)
    ]
    with tables_with_moments(settings):
        lookup = TablesWithMoments(
            embedding_specs=specs,
            feature_table_map=list(FEATURES),
            optimizer=OPTIMIZERS[optimizer],
            pooling_mode=PoolingMode.SUM,
            learning_rate=0.3,
            eps=1e-8,
            table_names=names,
            embedding_shard_info=[(rows, dim, 0, 0) for rows, dim in zip(shape.rows, shape.dims, strict=True)],
        )
    for number, weights in enumerate(lookup.split_embedding_weights()):
        rows, dim = weights.shape
        first = FirstWeights(UNIFORM, 7 + number, 2.0**-23, dim)
        source = getattr(weights, "source", None)
        if isinstance(source, ShardRows):
            source.begin(first)
        else:
            first.sample(np.arange(rows), np.arange(rows), weights.detach().numpy())
    assert speed_up_cpu_tables([lookup]) == 1
    return lookup


def batches(kind: str, shape: Shape, num_steps: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bags of 0 to 2 ids: uniform, zipf, or a scan that never comes back to a row while it is in a slot."""
    rng = np.random.default_rng(seed)
    at = 0
    for _ in range(num_steps):
        lengths = rng.integers(0, 3, (len(FEATURES), BATCH))
        ids = []
        for table, count in zip(FEATURES, lengths.sum(axis=1), strict=True):
            rows = shape.rows[table]
            if kind == "uniform":
                own = rng.integers(0, rows, count)
            elif kind == "zipf":
                own = np.minimum((rows ** rng.random(count)).astype(np.int64) - 1, rows - 1)
            else:
                own = np.arange(at, at + count) % rows
            ids.append(own)
        at += int(lengths.max(initial=0).sum()) + 30
        offsets = np.concatenate([[0], lengths.reshape(-1).cumsum()])
        yield torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))


def train(
    lookup: TablesWithMoments, kind: str, shape: Shape, num_steps: int, *, seed: int = 0, ahead: bool = True
) -> list[torch.Tensor]:
    """The pooled rows of each step. Looks one batch ahead, as a train pipeline does; an evaluation comes between two steps."""
    forward = lookup.forward
    assert isinstance(forward, FastLookup)
    coming = list(batches(kind, shape, num_steps, seed))
    outputs = []
    for step, (ids, offsets) in enumerate(coming):
        if forward.tiered and ahead and step + 1 < len(coming):
            later = coming[step + 1]
            forward.tiered.prefetch_rows(forward.tiered.ids_by_table(later[0].numpy(), later[1].numpy()))
        forward.num_steps = step
        pooled = forward(ids, offsets)
        outputs.append(pooled.detach().clone())
        generator = torch.Generator().manual_seed(step)
        pooled.backward(torch.randn(pooled.shape, generator=generator))
        if step % 5 == 2:
            with torch.no_grad():
                outputs.append(forward(*coming[step // 2]).clone())
    return outputs


def state_of(lookup: TablesWithMoments) -> list[torch.Tensor]:
    """All rows of all tables, and their optimizer's states."""
    states = [state for table in lookup.split_optimizer_states() for state in table]
    return [each.read() if hasattr(each, "read") else each for each in (*lookup.split_embedding_weights(), *states)]
