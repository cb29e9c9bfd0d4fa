"""An optimizer that sharding or FBGEMM would change or ignore is refused, or warned about."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import optim
from torchrec.modules.embedding_configs import DataType

from pipeline import devices
from pipeline.config.optimizers import OptimizerConfig, SparseOptimizerConfig
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.config.training import CommsConfig
from pipeline.embeddings.collection import Managed
from pipeline.embeddings.limits import allowed_sharding_types, sharding_types_exact_for
from pipeline.embeddings.table import ManagedRows, RowUpdates, Table
from pipeline.runtime.errors import ShardingError
from pipeline.sharding.torchrec import sharding_checks
from pipeline.sharding.torchrec.sharding import shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer, configure_fbgemm
from tests.support.messages import mentions, names
from tests.support.optimizers import ROWWISE, SGD
from tests.support.ranks import RankPool
from tests.training import tiny
from tests.training.tiny import TABLES, TinyModel, TinyTable
from tests.training.tiny_training import distance, train_sharded, train_unsharded


def job_table(name: str, *sharding_types: str) -> Table:
    constraint = ConstraintConfig(sharding_types=list(sharding_types))
    return Table(name, 53, 8, [f"f_{name}"], "sum", "fp32", InitConfig(), constraint, [1.0])


def distance_of_column_shards(rank: int) -> float:
    tables = [TinyTable("a", "column_wise"), TinyTable("b", "row_wise")]
    return distance(train_sharded(rank, tables, ROWWISE), train_unsharded(tables, ROWWISE)[:2])


def test_row_wise_adagrad_on_column_shards_is_another_optimizer(ranks: RankPool) -> None:
    difference = ranks.run(2, distance_of_column_shards)[0]
    print(f"column_wise differs by {difference:.2f} after 5 steps")
    assert difference > 0.01
    assert set(sharding_types_exact_for("rowwise_adagrad")) == {
        "data_parallel",
        "table_wise",
        "row_wise",
        "table_row_wise",
    }
    assert "column_wise" in sharding_types_exact_for("adagrad")


def shard_columns(rank: int, allowed: list[str]) -> str:
    tables = [TinyTable("a", "column_wise"), TinyTable("b", "row_wise")]
    model = TinyModel(tables)
    apply_sparse_optimizer(model, ROWWISE.sparse)
    try:
        job_tables = [job_table("a", *allowed), job_table("b")]
        shard_model(model, tiny.plan_of(model, tables), CommsConfig(), tiny.context(rank), tables=job_tables)
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


def refusal_of(rank: int, sparse: SparseOptimizerConfig) -> str:
    """Without our kernels."""
    tables = [TinyTable("a")]
    model = TinyModel(tables)
    apply_sparse_optimizer(model, sparse)
    plan: Any = tiny.plan_of(model, tables).plan[TABLES]
    with pytest.raises(ShardingError) as error, devices.using(devices.named("cpu", plain=True)):
        sharding_checks.check_sharding(model.embedding_bag_collection, plan)
    return str(error.value)


def refusal_of_cached_managed_rows(rank: int) -> str:
    rows = Managed(ManagedRows("a", 53, 1, "lfu", 4), torch.nn.init.ones_)
    model = TinyModel([TinyTable("a", init=rows)])
    plan: Any = tiny.plan_of(model, [TinyTable("a")]).plan[TABLES]
    plan["a"].compute_kernel = "fused_uvm_caching"
    with pytest.raises(ShardingError) as error, devices.using(devices.named("cuda")):
        sharding_checks.check_sharding(model.embedding_bag_collection, plan)
    return str(error.value)


def test_managed_rows_behind_a_cache_are_refused(ranks: RankPool) -> None:
    message = ranks.run(1, refusal_of_cached_managed_rows)[0]
    assert mentions(message, "a fused_uvm_caching managed_collision compute_kernels=[fused_uvm]")


@pytest.mark.parametrize("setting", ["weight_decay", "gradient_clip_value", "gradient_clip_norm"])
def test_decay_and_clipping_are_not_silently_ignored_on_cpu(ranks: RankPool, setting: str) -> None:
    message = ranks.run(1, refusal_of, SparseOptimizerConfig("sgd", **{setting: 0.1}))[0]
    assert "ignore" in message and mentions(message, f"{setting} 0.1 sharding.fast_cpu=true")


def told(config: SparseOptimizerConfig, l2: float = 0.0) -> dict[str, Any]:
    """What FBGEMM is built with on a GPU."""
    model = TinyModel([TinyTable("a")])
    apply_sparse_optimizer(model, config, {"a": RowUpdates(l2)})
    weight = model.embedding_bag_collection.embedding_bags["a"].weight
    configure_fbgemm("a", weight)
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
    [
        (SparseOptimizerConfig("adam", weight_decay=0.1), 0.0),
        (SparseOptimizerConfig("sgd"), 0.1),
        (SparseOptimizerConfig("adamw", weight_decay=0.1), 0.1),
        (SparseOptimizerConfig("adam", gradient_clip_value=0.1), 0.0),
    ],
)
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
        shard_model(model, tiny.plan_of(model, tables), CommsConfig(), tiny.context(rank))
    return str(error.value)


def test_max_norm_is_not_silently_ignored_on_cpu(ranks: RankPool) -> None:
    assert mentions(ranks.run(1, refused_max_norm)[0], "FBGEMM max_norm CPU 1.0")


def warnings_while_building(rank: int, tables: list[TinyTable], config: OptimizerConfig) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pipeline").addHandler(handler)
    try:
        tiny.build(rank, tables, config)
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
    tables = [TinyTable("a", "data_parallel", data_type=DataType.FP16)]
    message = ranks.run(1, tiny.refusal_of_build, tables, ROWWISE)[0]
    assert mentions(message, "data_parallel FP16")


def fp16_table_trains(rank: int) -> tuple[float, torch.dtype]:
    tables = [TinyTable("a", "row_wise", data_type=DataType.FP16), TinyTable("b")]
    model, optimizer = tiny.build(rank, tables, ROWWISE)
    first = tiny.full_weights(model)[f"{TABLES}.embedding_bags.a.weight"]
    for features, labels in tiny.batches(tables, 3, rank, dist.get_world_size()):
        optimizer.zero_grad()
        model(features, labels)[0].backward()
        optimizer.step()
    last = tiny.full_weights(model)[f"{TABLES}.embedding_bags.a.weight"]
    return float((last - first).abs().max()), last.dtype


def test_fp16_table_trains(ranks_each_way: RankPool) -> None:
    moved, dtype = ranks_each_way.run(2, fp16_table_trains)[0]
    assert moved > 0.1 and dtype == torch.float16


def shared_kwargs(rank: int) -> dict[str, float]:
    tables = [TinyTable("a"), TinyTable("b", "row_wise")]
    model = TinyModel(tables)
    kwargs = {"lr": 0.25}
    _apply_optimizer_in_backward(optim.SGD, model.embedding_bag_collection.parameters(), kwargs)
    sharded = shard_model(model, tiny.plan_of(model, tables), CommsConfig(), tiny.context(rank))
    assert {group["lr"] for group in sharded.fused_optimizer.param_groups} == {0.25}
    return kwargs


def test_optimizer_settings_shared_by_tables_are_not_rewritten_by_sharding(ranks: RankPool) -> None:
    assert ranks.run(1, shared_kwargs) == [{"lr": 0.25}]
