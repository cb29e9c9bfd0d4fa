"""What TorchRec 1.8 does wrongly without an error: each test is named after what would go wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import optim
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.model import ModelConfig
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.config.training import CommsConfig, DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.models.build import build_model
from pipeline.models.deepfm import SimpleDeepFMConfig
from pipeline.models.dlrm import DLRMConfig, DLRMDCNConfig
from pipeline.planner.limits import allowed_sharding_types, sharding_types_exact_for
from pipeline.runtime.errors import ShardingError
from pipeline.sharding.torchrec import sharding_checks
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer, tell_fbgemm
from pipeline.sharding.torchrec.table_init import initialize_tables
from tests.support.messages import mentions, names
from tests.support.ranks import RankPool
from tests.training.tiny import TABLES, TinyModel, TinyTable, batches, build, context, full_weights, plan_of
from tests.training.tiny_training import distance, train_sharded, train_unsharded

SGD = OptimizerConfig(SparseOptimizerConfig("sgd", lr=8.0), DenseOptimizerConfig("adam", lr=0.01))
ROWWISE = OptimizerConfig(SparseOptimizerConfig("rowwise_adagrad", lr=0.1), DenseOptimizerConfig("adam", lr=0.01))


def pooled_differences(rank: int, tables: list[TinyTable], local_size: int = 0) -> dict[str, float]:
    """By feature: how far the sharded pooled embeddings are from the unsharded ones."""
    sharded, _ = build(rank, tables, SGD, local_size=local_size)
    unsharded = TinyModel(tables, torch.device("cpu"))
    initialize_tables(unsharded, 3)
    features, _ = next(batches(tables, 1, rank, dist.get_world_size()))
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


def two_poolings_of_one_feature(rank: int) -> str:
    tables = [TinyTable("a", "row_wise", "mean", ("shared",)), TinyTable("b", "table_wise", "sum", ("shared",))]
    with pytest.raises(ValueError) as error:
        build(rank, tables, SGD)
    return str(error.value)


def test_feature_of_a_row_wise_mean_table_is_not_divided_in_another_table(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, two_poolings_of_one_feature)[0], "MEAN shared")


def distance_of_column_shards(rank: int) -> float:
    tables = [TinyTable("a", "column_wise"), TinyTable("b", "row_wise")]
    return distance(train_sharded(rank, tables, ROWWISE), train_unsharded(tables, ROWWISE)[:2])


def test_row_wise_adagrad_on_column_shards_is_another_optimizer(ranks: RankPool) -> None:
    difference = ranks.run(2, distance_of_column_shards)[0]
    print(f"column_wise differs by {difference:.2f} after 5 steps")
    assert difference > 0.01
    assert set(sharding_types_exact_for("rowwise_adagrad")) == {
        "data_parallel", "table_wise", "row_wise", "table_row_wise",
    }  # fmt: skip
    assert "column_wise" in sharding_types_exact_for("adagrad")


def job_table(name: str, *sharding_types: str) -> Table:
    constraint = ConstraintConfig(sharding_types=list(sharding_types))
    return Table(name, 53, 8, [f"f_{name}"], "sum", "fp32", InitConfig(), constraint, [1.0])


def shard_columns(rank: int, allowed: list[str]) -> str:
    tables = [TinyTable("a", "column_wise"), TinyTable("b", "row_wise")]
    model = TinyModel(tables)
    apply_sparse_optimizer(model, ROWWISE.sparse)
    try:
        job_tables = [job_table("a", *allowed), job_table("b")]
        shard_model(model, plan_of(model, tables), CommsConfig(), context(rank), tables=job_tables)
    except ValueError as error:
        return str(error)
    return ""


def test_plan_with_column_shards_under_row_wise_adagrad_is_refused_unless_the_table_asks_for_it(
    ranks: RankPool,
) -> None:
    message = ranks.run(2, shard_columns, [])[0]
    assert mentions(message, "column_wise a")
    assert "tables.a.sharding.sharding_types=[column_wise]" in message
    assert ranks.run(2, shard_columns, ["column_wise"]) == ["", ""]
    assert allowed_sharding_types(job_table("a", "column_wise"), "rowwise_adagrad") == ("column_wise",)
    assert "column_wise" not in allowed_sharding_types(job_table("a"), "rowwise_adagrad")


def model_logits(rank: int, config: ModelConfig, kinds: list[str]) -> tuple[list[str], torch.Tensor]:
    """Keys in the order of the sharded collection's values, and the logits of a whole global batch."""
    tables = [TinyTable(f"t{i}", kind) for i, kind in enumerate(kinds)]
    job_tables = [job_table(table.name) for table in tables]
    model = build_model(config, job_tables, num_dense_features=3, seed=1)
    apply_sparse_optimizer(model, SGD.sparse)
    path, collection = next((n, m) for n, m in model.named_modules() if type(m).__name__ == "EmbeddingBagCollection")
    holder = nn.Module()
    holder.embedding_bag_collection = collection
    plan = ShardingPlan({path: plan_of(holder, tables).plan[TABLES]})
    sharded = shard_model(model, plan, CommsConfig(shared_memory=False), context(rank))  # in TorchRec's order
    features, _ = next(batches(tables, 1, rank, dist.get_world_size()))
    dense = torch.rand(32, 3, generator=torch.Generator().manual_seed(0)).chunk(dist.get_world_size())[rank]
    logits = sharded(dense, features).detach().reshape(-1)
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return sharded.module.get_submodule(path)(features).keys(), torch.cat(parts)


@pytest.mark.parametrize(
    "config",
    [DLRMConfig(dense_arch_layer_sizes=[8, 8], over_arch_layer_sizes=[8, 1]),
     DLRMDCNConfig(dense_arch_layer_sizes=[8, 8], over_arch_layer_sizes=[8, 1], dcn_num_layers=2, dcn_low_rank_dim=4),
     SimpleDeepFMConfig(hidden_layer_size=8, deep_fm_dimension=4)],
    ids=["dlrm", "dlrm_dcn", "simple_deepfm"],
)  # fmt: skip
def test_model_does_not_read_anothers_features_when_the_plan_reorders_them(
    ranks: RankPool, config: ModelConfig
) -> None:
    order, logits = ranks.run(2, model_logits, config, ["row_wise", "table_wise", "data_parallel"])[0]
    other_order, other_logits = ranks.run(2, model_logits, config, ["table_wise", "row_wise", "table_wise"])[0]
    assert order != other_order, "the plans were to order the values differently"
    assert float(logits.std()) > 0
    torch.testing.assert_close(logits, other_logits, rtol=0, atol=1e-6)


def refusal(rank: int, tables: list[TinyTable], config: OptimizerConfig) -> str:
    with pytest.raises(ValueError) as error:
        build(rank, tables, config)
    return str(error.value)


def refusal_of(rank: int, sparse: SparseOptimizerConfig) -> str:
    """Without our kernels."""
    tables = [TinyTable("a")]
    model = TinyModel(tables)
    apply_sparse_optimizer(model, sparse)
    plan: Any = plan_of(model, tables).plan[TABLES]
    with pytest.raises(ShardingError) as error:
        sharding_checks.check_sharding(model.embedding_bag_collection, plan, torch.device("cpu"), fast_cpu=False)
    return str(error.value)


@pytest.mark.parametrize("setting", ["weight_decay", "gradient_clip_value", "gradient_clip_norm"])
def test_decay_and_clipping_are_not_silently_ignored_on_cpu(ranks: RankPool, setting: str) -> None:
    message = ranks.run(1, refusal_of, SparseOptimizerConfig("sgd", **{setting: 0.1}))[0]
    assert "ignore" in message and mentions(message, f"{setting} 0.1 sharding.fast_cpu=true")


def told(config: SparseOptimizerConfig, l2: float = 0.0) -> dict[str, Any]:
    """What FBGEMM is built with on a GPU."""
    model = TinyModel([TinyTable("a")])
    apply_sparse_optimizer(model, config, {"a": l2})
    weight = model.embedding_bag_collection.embedding_bags["a"].weight
    tell_fbgemm("a", weight)
    return dict(weight._optimizer_kwargs[0])


def test_on_gpus_fbgemm_gets_the_decay_that_it_has() -> None:
    kept = told(SparseOptimizerConfig("adamw", weight_decay=0.1))
    assert kept["weight_decay"] == 0.1 and "weight_decay_mode" not in kept
    added = told(SparseOptimizerConfig("rowwise_adagrad", weight_decay=0.1), 0.2)
    assert added["weight_decay"] == pytest.approx(0.3) and added["weight_decay_mode"] == WeightDecayMode.L2
    beside = told(SparseOptimizerConfig("rowwise_adagrad", weight_decay=0.1, weight_decay_mode="decoupled"))
    assert beside["weight_decay_mode"] == WeightDecayMode.DECOUPLE
    assert told(SparseOptimizerConfig("lamb", weight_decay=0.1))["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("config", "l2"),
    [(SparseOptimizerConfig("adam", weight_decay=0.1), 0.0), (SparseOptimizerConfig("sgd"), 0.1),
     (SparseOptimizerConfig("adamw", weight_decay=0.1), 0.1), (SparseOptimizerConfig("adam", gradient_clip_value=0.1), 0.0)],
)  # fmt: skip
def test_what_fbgemm_would_ignore_on_gpus_is_refused(config: SparseOptimizerConfig, l2: float) -> None:
    with pytest.raises(ShardingError, match=names("a FBGEMM 0.1")):
        told(config, l2)


@pytest.mark.parametrize("name", ["adam", "adamw", "partial_rowwise_adam"])
def test_adam_on_cpu_without_our_kernels_is_refused_with_the_way_out(ranks: RankPool, name: str) -> None:
    message = ranks.run(1, refusal_of, SparseOptimizerConfig(name))[0]
    assert mentions(message, "FBGEMM sharding.fast_cpu=true optimizer.sparse.name=rowwise_adagrad")


def refused_max_norm(rank: int) -> str:
    tables = [TinyTable("a")]
    model = TinyModel(tables)
    _apply_optimizer_in_backward(optim.SGD, model.embedding_bag_collection.parameters(), {"lr": 0.1, "max_norm": 1.0})
    with pytest.raises(ValueError) as error:
        shard_model(model, plan_of(model, tables), CommsConfig(), context(rank))
    return str(error.value)


def test_max_norm_is_not_silently_ignored_on_cpu(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, refused_max_norm)[0], "FBGEMM max_norm CPU 1.0")


def warnings_while_building(rank: int, tables: list[TinyTable], config: OptimizerConfig) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipeline").addHandler(handler)
    try:
        build(rank, tables, config)
    finally:
        logging.getLogger("pipeline").removeHandler(handler)
    return lines


def warnings_without_numba(rank: int, *arguments: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding_checks, "find_spec", lambda name: None)
        return warnings_while_building(rank, *arguments)


def test_fp16_table_that_would_lose_small_updates_on_cpu_is_warned_about(ranks: RankPool) -> None:
    tables = [TinyTable("a", data_type=DataType.FP16), TinyTable("b")]
    assert ranks.run(1, warnings_while_building, tables, SGD)[0] == []  # our kernels round stochastically
    lines = ranks.run(1, warnings_without_numba, tables, SGD)[0]
    assert len(lines) == 1 and mentions(lines[0], "fp16 CPU a")


def test_column_shards_under_a_limit_of_rows_norms_are_warned_about(ranks: RankPool) -> None:
    config = OptimizerConfig(SparseOptimizerConfig("sgd", gradient_clip_norm=1.0))
    lines = ranks.run(2, warnings_while_building, [TinyTable("a", "column_wise"), TinyTable("b")], config)[0]
    assert len(lines) == 1 and mentions(lines[0], "column_wise a gradient_clip_norm")


def test_column_shards_under_row_wise_adagrad_are_warned_about(ranks: RankPool) -> None:
    tables = [TinyTable("a", "column_wise"), TinyTable("b")]
    lines, of_other_rank = ranks.run(2, warnings_while_building, tables, ROWWISE)
    assert not of_other_rank and len(lines) == 1 and mentions(lines[0], "column_wise a")


def test_replicated_fp16_table_does_not_get_fp16_optimizer_state(ranks: RankPool) -> None:
    message = ranks.run(1, refusal, [TinyTable("a", "data_parallel", data_type=DataType.FP16)], ROWWISE)[0]
    assert mentions(message, "data_parallel FP16")


def fp16_table_trains(rank: int) -> tuple[float, torch.dtype]:
    tables = [TinyTable("a", "row_wise", data_type=DataType.FP16), TinyTable("b")]
    model, optimizer = build(rank, tables, ROWWISE)
    first = full_weights(model)[f"{TABLES}.embedding_bags.a.weight"]
    for features, labels in batches(tables, 3, rank, dist.get_world_size()):
        optimizer.zero_grad()
        model(features, labels)[0].backward()
        optimizer.step()
    last = full_weights(model)[f"{TABLES}.embedding_bags.a.weight"]
    return float((last - first).abs().max()), last.dtype


def test_fp16_table_trains(ranks_each_way: RankPool) -> None:
    moved, dtype = ranks_each_way.run(2, fp16_table_trains)[0]
    assert moved > 0.1 and dtype == torch.float16


def refused_dense_kernel(rank: int) -> str:
    tables = [TinyTable("a", "row_wise")]
    model = TinyModel(tables)  # without an optimizer TorchRec plans the dense kernel by itself
    with pytest.raises(ValueError) as error:
        shard_model(model, plan_of(model, tables), CommsConfig(), context(rank))
    return str(error.value)


def test_sharded_table_is_not_given_the_dense_kernel_that_corrupts_its_checkpoints(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, refused_dense_kernel)[0], "row_wise a")
    for kind in ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard"):
        assert make_sharders(CommsConfig())[0].compute_kernels(kind, "cpu") == ["fused"]


def test_row_wise_is_offered_on_cpu() -> None:
    offered = make_sharders(CommsConfig())[0].sharding_types("cpu")
    assert {"data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise",
            "grid_shard"} == set(offered)  # fmt: skip


def refused_dtypes(rank: int, ids: torch.dtype, lengths: torch.dtype) -> str:
    tables = [TinyTable("a", "row_wise")]
    model, _ = build(rank, tables, SGD)
    features, labels = next(batches(tables, 1, rank, dist.get_world_size()))
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
        shard_model(model, plan_of(model, tables), CommsConfig(), context(rank))
    return str(error.value)


def test_weights_of_a_collection_that_is_not_on_meta_are_not_dropped_silently(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, weights_on_cpu)[0], "weights cpu")


def row_wise_weights(rank: int) -> torch.Tensor:
    torch.manual_seed(0)  # one seed on all ranks, as everywhere
    model, _ = build(rank, [TinyTable("a", "row_wise", num_embeddings=64)], SGD)
    return full_weights(model)[f"{TABLES}.embedding_bags.a.weight"]


def test_row_shards_of_one_seed_do_not_start_with_identical_rows(ranks_each_way: RankPool) -> None:
    weights = ranks_each_way.run(2, row_wise_weights)[0]
    assert not torch.equal(weights[:32], weights[32:])
    assert len(weights.unique(dim=0)) == 64


def train_through_pipeline(rank: int) -> bool:
    """Whether the caller's batches are what they were, with the pipeline told to free their storage."""
    tables = [TinyTable("a", "table_wise"), TinyTable("b", "row_wise"), TinyTable("c", "table_wise")]
    model, optimizer = build(rank, tables, SGD)
    mine = [
        Batch(torch.zeros(len(labels), 0), features, labels, torch.ones(len(labels)))
        for features, labels in batches(tables, 4, rank, dist.get_world_size())
    ]
    before = [(batch.sparse_features.values().clone(), batch.sparse_features.lengths().clone()) for batch in mine]
    model._dmp_wrapped_module = BatchModel(model.module)
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    pipeline._free_features_storage_early = True  # torchrec 1.8's free_features_storage_early=True; earlier has none
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


def shared_kwargs(rank: int) -> dict[str, float]:
    tables = [TinyTable("a"), TinyTable("b", "row_wise")]
    model = TinyModel(tables)
    kwargs = {"lr": 0.25}
    _apply_optimizer_in_backward(optim.SGD, model.embedding_bag_collection.parameters(), kwargs)
    sharded = shard_model(model, plan_of(model, tables), CommsConfig(), context(rank))
    assert {group["lr"] for group in sharded.fused_optimizer.param_groups} == {0.25}
    return kwargs


def test_optimizer_settings_shared_by_tables_are_not_rewritten_by_sharding(ranks: RankPool) -> None:
    assert ranks.run(1, shared_kwargs) == [{"lr": 0.25}]


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
            shard_model(model, plan_of(model, tables), CommsConfig(), context(rank))
        except ValueError as error:
            messages.append(str(error))
    return "".join(messages)


@pytest.mark.parametrize(("kind", "name"), [(RawParameter, "weight"), (WithBuffer, "index")])
def test_dense_module_on_meta_does_not_come_up_with_what_memory_holds(
    ranks: RankPool, kind: type[nn.Module], name: str
) -> None:
    message = ranks.run(1, raw_memory, kind)[0]
    assert message.count("on the meta device and no way to fill it") == 1 and f"'{name}'" in message


def stale_plan(rank: int, planned: list[TinyTable]) -> str:
    tables = [TinyTable("a"), TinyTable("user_id")]
    model = TinyModel(tables)
    apply_sparse_optimizer(model, SGD.sparse)
    old = TinyModel(planned)
    apply_sparse_optimizer(old, SGD.sparse)
    with pytest.raises(ValueError) as error:
        shard_model(model, plan_of(old, planned), CommsConfig(), context(rank))
    return str(error.value)


def test_shard_of_a_width_that_fbgemm_cannot_hold_is_refused(ranks: RankPool) -> None:
    message = ranks.run(1, refusal, [TinyTable("a", embedding_dim=6)], SGD)[0]
    assert mentions(message, "table_wise FBGEMM")


def test_plan_that_leaves_a_table_out_is_refused(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, stale_plan, [TinyTable("a")])[0], "user_id")


def test_plan_for_other_tables_is_refused(ranks: RankPool) -> None:
    planned = [TinyTable("a"), TinyTable("user_id"), TinyTable("user_ids")]
    assert mentions(ranks.run(1, stale_plan, planned)[0], "user_ids user_id")
