"""What TorchRec 1.8 and 1.9 do wrongly without an error: each test is named after what would go wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import intra_and_cross_node_pg
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.model import ModelConfig
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.config.training import CommsConfig
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.extras.models.simple_deepfm import SimpleDeepFMConfig
from pipeline.models.build import build_model
from pipeline.models.dlrm import DLRMConfig, DLRMDCNConfig
from pipeline.sharding.torchrec.sharding import join_hosts, make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.support.messages import mentions
from tests.support.optimizers import SGD
from tests.support.ranks import RankPool
from tests.training import tiny
from tests.training.tiny import TABLES, TinyModel, TinyTable


def pooled_differences(rank: int, tables: list[TinyTable], local_size: int = 0) -> dict[str, float]:
    """By feature: how far the sharded pooled embeddings are from the unsharded ones."""
    sharded, _ = tiny.build(rank, tables, SGD, local_size=local_size)
    unsharded = TinyModel(tables, torch.device("cpu"))
    initialize_tables(unsharded, 3)
    features, _ = next(tiny.batches(tables, 1, rank, dist.get_world_size()))
    got = sharded.module.embedding_bag_collection(features)
    expected = unsharded.embedding_bag_collection(features)
    return {key: float((got[key] - expected[key]).detach().abs().max()) for key in unsharded.keys}


@pytest.mark.parametrize("neighbour", ["table_wise", "column_wise", "data_parallel", "row_wise"])
@pytest.mark.parametrize("pooling", ["sum", pytest.param("mean", marks=pytest.mark.campaign)])
def test_mean_pooled_row_wise_table_does_not_corrupt_its_neighbours(
    ranks_each_way: RankPool, neighbour: str, pooling: str
) -> None:
    tables = [TinyTable("a", "row_wise", "mean"), TinyTable("b", neighbour, pooling, ("b1", "b2"))]
    differences = ranks_each_way.run(2, pooled_differences, tables)[0]
    assert max(differences.values()) < 1e-6, differences


def test_grid_sharded_mean_is_the_mean_of_the_bag_and_not_of_each_ranks_part(ranks: RankPool) -> None:
    tables = [TinyTable("a", "grid_shard", "mean"), TinyTable("b", "table_wise"), TinyTable("c", "grid_shard")]
    differences = ranks.run(4, pooled_differences, tables, 2, local_world_size=2)[0]
    assert max(differences.values()) < 1e-6, differences


def differences_on_joined_hosts(rank: int, tables: list[TinyTable]) -> tuple[int, dict[str, float]]:
    join_hosts(2)
    differences = pooled_differences(rank, tables, local_size=dist.get_world_size())
    group, _ = intra_and_cross_node_pg()
    assert group is not None
    return group.size(), differences


@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard"])
def test_a_table_is_sharded_by_rows_over_the_hosts_that_nvlink_joins(ranks: RankPool, kind: str) -> None:
    """Two hosts of two ranks, as one NVLink domain."""
    tables = [TinyTable("a", kind, num_embeddings=64), TinyTable("b", "table_wise")]
    for joined, differences in ranks.run(4, differences_on_joined_hosts, tables, local_world_size=2):
        assert joined == 4
        assert max(differences.values()) < 1e-6, differences


def test_feature_of_a_row_wise_mean_table_is_not_divided_in_another_table(ranks: RankPool) -> None:
    tables = [TinyTable("a", "row_wise", "mean", ("shared",)), TinyTable("b", "table_wise", "sum", ("shared",))]
    assert mentions(ranks.run(1, tiny.refusal_of_build, tables, SGD)[0], "MEAN shared")


def model_logits(rank: int, config: ModelConfig, kinds: list[str]) -> tuple[list[str], torch.Tensor]:
    """Keys in the order of the sharded collection's values, and the logits of a whole global batch."""
    tables = [TinyTable(f"t{i}", kind) for i, kind in enumerate(kinds)]
    job_tables = [
        Table(table.name, 53, 8, [f"f_{table.name}"], "sum", "fp32", InitConfig(), ConstraintConfig(), [1.0])
        for table in tables
    ]
    model = build_model(config, job_tables, num_dense_features=3, seed=1)
    apply_sparse_optimizer(model, SGD.sparse)
    path, collection = next((n, m) for n, m in model.named_modules() if type(m).__name__ == "EmbeddingBagCollection")
    holder = nn.Module()
    holder.embedding_bag_collection = collection
    plan = ShardingPlan({path: tiny.plan_of(holder, tables).plan[TABLES]})
    sharded = shard_model(model, plan, CommsConfig(shared_memory=False), tiny.context(rank))  # in TorchRec's order
    features, _ = next(tiny.batches(tables, 1, rank, dist.get_world_size()))
    dense = torch.rand(32, 3, generator=torch.Generator().manual_seed(0)).chunk(dist.get_world_size())[rank]
    logits = sharded(dense, features).detach().reshape(-1)
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return sharded.module.get_submodule(path)(features).keys(), torch.cat(parts)


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        DLRMConfig(dense_arch_layer_sizes=[8, 8], over_arch_layer_sizes=[8, 1]),
        DLRMDCNConfig(
            dense_arch_layer_sizes=[8, 8], over_arch_layer_sizes=[8, 1], dcn_num_layers=2, dcn_low_rank_dim=4
        ),
        SimpleDeepFMConfig(hidden_layer_size=8, deep_fm_dimension=4),
    ],
    ids=["dlrm", "dlrm_dcn", "simple_deepfm"],
)
def test_model_does_not_read_anothers_features_when_the_plan_reorders_them(
    ranks: RankPool, config: ModelConfig
) -> None:
    order, logits = ranks.run(2, model_logits, config, ["row_wise", "table_wise", "data_parallel"])[0]
    other_order, other_logits = ranks.run(2, model_logits, config, ["table_wise", "row_wise", "table_wise"])[0]
    assert order != other_order, "the plans were to order the values differently"
    assert float(logits.std()) > 0
    torch.testing.assert_close(logits, other_logits, rtol=0, atol=1e-6)


def refused_dense_kernel(rank: int) -> str:
    tables = [TinyTable("a", "row_wise")]
    model = TinyModel(tables)  # without an optimizer TorchRec plans the dense kernel by itself
    with pytest.raises(ValueError) as error:
        shard_model(model, tiny.plan_of(model, tables), CommsConfig(), tiny.context(rank))
    return str(error.value)


def test_sharded_table_is_not_given_the_dense_kernel_that_corrupts_its_checkpoints(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, refused_dense_kernel)[0], "row_wise a")
    for kind in ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard"):
        assert make_sharders(CommsConfig())[0].compute_kernels(kind, "cpu") == ["fused"]


def test_row_wise_is_offered_on_cpu() -> None:
    offered = make_sharders(CommsConfig())[0].sharding_types("cpu")
    assert {
        "data_parallel",
        "table_wise",
        "column_wise",
        "table_column_wise",
        "row_wise",
        "table_row_wise",
        "grid_shard",
    } == set(offered)


def refused_dtypes(rank: int, ids: torch.dtype, lengths: torch.dtype) -> str:
    tables = [TinyTable("a", "row_wise")]
    model, _ = tiny.build(rank, tables, SGD)
    features, labels = next(tiny.batches(tables, 1, rank, dist.get_world_size()))
    features = KeyedJaggedTensor(features.keys(), features.values().to(ids), lengths=features.lengths().to(lengths))
    with pytest.raises(ValueError) as error:
        model(features, labels)
    return str(error.value)


@pytest.mark.parametrize(
    ("ids", "lengths"), [(torch.int32, torch.int32), (torch.int64, torch.int64)], ids=["ids", "lengths"]
)
def test_ids_of_a_dtype_that_other_ranks_may_not_send_do_not_arrive_as_garbage(
    ranks: RankPool, ids: torch.dtype, lengths: torch.dtype
) -> None:
    for message in ranks.run(2, refused_dtypes, ids, lengths):
        assert mentions(message, f"sparse_features {ids} {lengths} torch.int64")


def weights_on_cpu(rank: int) -> str:
    tables = [TinyTable("a")]
    model = TinyModel(tables, torch.device("cpu"))
    apply_sparse_optimizer(model, SGD.sparse)
    with pytest.raises(ValueError) as error:
        shard_model(model, tiny.plan_of(model, tables), CommsConfig(), tiny.context(rank))
    return str(error.value)


def test_weights_of_a_collection_that_is_not_on_meta_are_not_dropped_silently(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, weights_on_cpu)[0], "weights cpu")


def row_wise_weights(rank: int) -> torch.Tensor:
    torch.manual_seed(0)  # one seed on all ranks, as everywhere
    model, _ = tiny.build(rank, [TinyTable("a", "row_wise", num_embeddings=64)], SGD)
    return tiny.full_weights(model)[f"{TABLES}.embedding_bags.a.weight"]


def test_row_shards_of_one_seed_do_not_start_with_identical_rows(ranks_each_way: RankPool) -> None:
    weights = ranks_each_way.run(2, row_wise_weights)[0]
    assert not torch.equal(weights[:32], weights[32:])
    assert len(weights.unique(dim=0)) == 64


def train_through_pipeline(rank: int) -> bool:
    """Whether the caller's batches are what they were, with the pipeline told to free their storage."""
    tables = [TinyTable("a", "table_wise"), TinyTable("b", "row_wise"), TinyTable("c", "table_wise")]
    model, optimizer = tiny.build(rank, tables, SGD)
    mine = [
        Batch(torch.zeros(len(labels), 0), features, labels, torch.ones(len(labels)))
        for features, labels in tiny.batches(tables, 4, rank, dist.get_world_size())
    ]
    before = [(batch.sparse_features.values().clone(), batch.sparse_features.lengths().clone()) for batch in mine]
    model._dmp_wrapped_module = BatchModel(model.module)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    pipeline._free_features_storage_early = True  # free_features_storage_early=True, since torchrec 1.8
    stream = iter(mine)
    for _ in mine:
        pipeline.progress(stream)
    return all(
        torch.equal(batch.sparse_features.values(), values) and torch.equal(batch.sparse_features.lengths(), lengths)
        for batch, (values, lengths) in zip(mine, before, strict=True)
    )


class BatchModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        return self.model(batch.sparse_features, batch.labels)


def test_train_pipeline_does_not_destroy_the_callers_batch_on_cpu(ranks_each_way: RankPool) -> None:
    assert ranks_each_way.run(2, train_through_pipeline) == [True, True]


class RawParameter(nn.Module):
    """Draws its weight in __init__, as torchrec's cross nets do: on meta nothing would ever fill it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))


class WithBuffer(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("index", torch.arange(1, 4, device=device))


def raw_memory(rank: int, kind: type[nn.Module]) -> str:
    tables = [TinyTable("a")]
    messages = []
    for device in ("cpu", "meta"):
        model = TinyModel(tables)
        model.extra = kind(device)
        apply_sparse_optimizer(model, SGD.sparse)
        try:
            shard_model(model, tiny.plan_of(model, tables), CommsConfig(), tiny.context(rank))
        except ValueError as error:
            messages.append(str(error))
    return "".join(messages)


@pytest.mark.parametrize(("kind", "name"), [(RawParameter, "weight"), (WithBuffer, "index")])
def test_dense_module_on_meta_does_not_come_up_with_what_memory_holds(
    ranks: RankPool, kind: type[nn.Module], name: str
) -> None:
    message = ranks.run(1, raw_memory, kind)[0]
    assert message.count("on the meta device, and nothing would initialize it") == 1 and f"'{name}'" in message


def stale_plan(rank: int, planned: list[TinyTable]) -> str:
    tables = [TinyTable("a"), TinyTable("user_id")]
    model = TinyModel(tables)
    apply_sparse_optimizer(model, SGD.sparse)
    old = TinyModel(planned)
    apply_sparse_optimizer(old, SGD.sparse)
    with pytest.raises(ValueError) as error:
        shard_model(model, tiny.plan_of(old, planned), CommsConfig(), tiny.context(rank))
    return str(error.value)


def test_shard_of_a_width_that_fbgemm_cannot_hold_is_refused(ranks: RankPool) -> None:
    message = ranks.run(1, tiny.refusal_of_build, [TinyTable("a", embedding_dim=6)], SGD)[0]
    assert mentions(message, "table_wise FBGEMM")


def test_plan_that_leaves_a_table_out_is_refused(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, stale_plan, [TinyTable("a")])[0], "user_id")


def test_plan_for_other_tables_is_refused(ranks: RankPool) -> None:
    planned = [TinyTable("a"), TinyTable("user_id"), TinyTable("user_ids")]
    assert mentions(ranks.run(1, stale_plan, planned)[0], "user_ids user_id")
