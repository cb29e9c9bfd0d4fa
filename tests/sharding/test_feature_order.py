"""Pooled embeddings come in the order of the features, whatever the plan, with the same numbers and gradients."""

from __future__ import annotations

import torch

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import CommsConfig
from pipeline.sharding.torchrec.sharder import ShardedTables
from tests.support.ranks import RankPool
from tests.training.tiny import TinyTable, batches, build

CONFIG = OptimizerConfig(SparseOptimizerConfig("sgd", lr=0.1), DenseOptimizerConfig("sgd"))
KINDS = ["data_parallel", "table_wise", "row_wise", "data_parallel", "column_wise", "table_wise"]


def _pooled(rank: int, shared_memory: bool, pooling: str = "sum") -> tuple[list[str], torch.Tensor, list[torch.Tensor]]:
    """Keys, the values by key, and the table of rank 0's first shards after a step whose gradient depends on the column."""
    tables = [TinyTable(f"t{index}", kind, pooling, embedding_dim=8) for index, kind in enumerate(KINDS)]
    model, optimizer = build(rank, tables, CONFIG, CommsConfig(shared_memory=shared_memory))
    sharded = next(module for module in model.modules() if isinstance(module, ShardedTables))
    features, _ = next(iter(batches(tables, 1, rank, 2)))
    optimizer.zero_grad()
    pooled = sharded(features)
    values = torch.cat([pooled[f"f_t{index}"] for index in range(len(KINDS))], dim=1)
    (values * torch.linspace(-1, 1, values.numel()).view(values.shape)).sum().backward()
    optimizer.step()
    weights = [weight.detach().clone() for weight in sharded.parameters()]
    return list(pooled.keys()), values.detach(), weights


def test_features_are_in_order_with_the_same_numbers(ranks: RankPool) -> None:
    here = ranks.run(2, _pooled, True)
    for (keys, values, weights), (_, expected, trained) in zip(here, ranks.run(2, _pooled, False), strict=True):
        assert keys == [f"f_t{index}" for index in range(len(KINDS))]
        assert torch.equal(values, expected)
        assert len(weights) == len(trained) > 0
        for one, other in zip(weights, trained, strict=True):
            assert torch.equal(one, other)


def test_mean_pooled_rows_are_still_divided_by_their_own_counts(ranks: RankPool) -> None:
    for (_, values, _), (_, expected, _) in zip(
        ranks.run(2, _pooled, True, "mean"), ranks.run(2, _pooled, False, "mean"), strict=True
    ):
        assert torch.equal(values, expected)
