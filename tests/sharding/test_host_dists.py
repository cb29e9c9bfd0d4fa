"""Tables trained over shared memory become, bit for bit, those trained over gloo."""

from __future__ import annotations

import pytest
import torch

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.training import CommsConfig
from pipeline.sharding.host_collectives import IdsOnHost, PooledOnHost
from pipeline.sharding.torchrec.sharder import ShardedTables
from tests.support.optimizers import ROWWISE
from tests.support.ranks import RankPool
from tests.training.tiny import TinyTable, batches, build
from tests.training.tiny_training import distance, train_sharded

KINDS = ["table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel"]
ADAGRAD = OptimizerConfig(SparseOptimizerConfig("adagrad", lr=0.1), DenseOptimizerConfig("adam", lr=0.01))


def _apart(rank: int, tables: list[TinyTable], config: OptimizerConfig) -> float:
    by_gloo = train_sharded(rank, tables, config, CommsConfig(shared_memory=False))
    return distance(train_sharded(rank, tables, config, CommsConfig()), by_gloo)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [
        (2, KINDS),
        (3, ["table_wise"]),  # two ranks have no table
        (3, [kind for kind in KINDS if kind != "row_wise"]),  # whose gradients go by batches of one size
    ],
)
def test_training_through_memory_equals_training_through_gloo(
    ranks: RankPool, num_ranks: int, kinds: list[str]
) -> None:
    tables = [TinyTable(f"t{index}", kind, embedding_dim=12) for index, kind in enumerate(kinds)]
    apart = ranks.run(num_ranks, _apart, tables, ADAGRAD)
    print(apart)
    assert max(apart) <= (0.0 if num_ranks == 2 else 1e-5)  # a sum of three depends on its order


def test_mean_pooled_tables_too(ranks: RankPool) -> None:
    tables = [TinyTable("a", "table_wise", "mean"), TinyTable("b", "data_parallel", "mean"), TinyTable("c")]
    assert ranks.run(2, _apart, tables, ROWWISE) == [0.0, 0.0]


def _dists(rank: int, comms: CommsConfig) -> list[tuple[str, bool]]:
    """Of each sharding: its type, and whether its ids and embeddings go through memory."""
    tables = [TinyTable(kind, kind) for kind in KINDS]
    model, _ = build(rank, tables, ADAGRAD, comms)
    model(*next(iter(batches(tables, 1, rank, 2))))
    sharded = next(module for module in model.modules() if isinstance(module, ShardedTables))
    kinds = zip(sharded._sharding_types, sharded._input_dists, sharded._output_dists, strict=True)
    for _, ids, pooled in kinds:
        assert isinstance(ids, IdsOnHost) == isinstance(pooled, PooledOnHost)
    return [
        (kind, isinstance(ids, IdsOnHost))
        for kind, ids in zip(sharded._sharding_types, sharded._input_dists, strict=True)
    ]


@pytest.mark.long
def test_what_is_summed_or_quantized_stays_with_gloo(ranks: RankPool) -> None:
    through_memory = dict(ranks.run(2, _dists, CommsConfig())[0])
    assert {kind for kind, here in through_memory.items() if here} == {
        "table_wise",
        "column_wise",
        "table_column_wise",
    }
    for comms in (CommsConfig("bf16", "bf16"), CommsConfig(shared_memory=False)):
        assert not any(here for _, here in ranks.run(2, _dists, comms)[0])


def _of_uneven_batches(rank: int, comms: CommsConfig) -> torch.Tensor:
    """The last batch of an evaluation: one rank has fewer rows."""
    tables = [TinyTable("a"), TinyTable("b"), TinyTable("c")]
    model, _ = build(rank, tables, ROWWISE, comms)
    features, labels = next(iter(batches(tables, 1, 0, 1, batch_size=4 + 3 * rank)))
    with torch.no_grad():
        loss, _ = model(features, labels)
    return loss


def test_ranks_with_different_batch_sizes(ranks: RankPool) -> None:
    by_gloo = ranks.run(2, _of_uneven_batches, CommsConfig(shared_memory=False))
    assert ranks.run(2, _of_uneven_batches, CommsConfig()) == by_gloo
