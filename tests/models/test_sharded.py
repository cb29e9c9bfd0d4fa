"""Every model trains sharded as it trains whole: the same weights after the same global batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan

from pipeline.config.model import ModelConfig, used_tables
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.tables import InitConfig, TableConfig
from pipeline.config.training import CommsConfig
from pipeline.data.dataset import Dataset, FrequencyCurve, SparseFeature, Split
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.models.finalnet import FinalNetConfig
from pipeline.extras.models.gdcn import GDCNConfig
from pipeline.extras.models.user_item import MatrixFactorizationConfig, NCFConfig, TwoTowerConfig
from pipeline.extras.models.wukong import WukongConfig
from pipeline.extras.models.xdeepfm import XDeepFMConfig
from pipeline.models.build import build_model
from pipeline.models.dcn import DCNConfig, DCNv2Config
from pipeline.models.deepfm import DeepFMConfig
from pipeline.models.linear import FMConfig, LogisticRegressionConfig, WideDeepConfig
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.runtime.errors import ConfigError
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.sharding.torchrec.table_init import initialize_tables
from pipeline.training.optimizer import build_optimizer
from tests.support.messages import names
from tests.support.ranks import RankPool
from tests.training.tiny import full_weights

SIZES = {"user_id": 40, "user_group": 8, "item_id": 50, "item_genre": 12}
KINDS = ["row_wise", "data_parallel", "table_wise", "column_wise"]
OPTIMIZERS = OptimizerConfig(SparseOptimizerConfig("sgd", lr=4.0), DenseOptimizerConfig("sgd", lr=0.1))
PATH = "model.embedding_bag_collection"
CONFIGS: list[ModelConfig] = [
    LogisticRegressionConfig(),
    FMConfig(),
    WideDeepConfig(hidden_layer_sizes=[16]),
    MatrixFactorizationConfig(),
    NCFConfig(variant="gmf"),
    NCFConfig(variant="mlp", mlp_layer_sizes=[16, 8]),
    NCFConfig(variant="neumf", mlp_layer_sizes=[16, 8], gmf_dim=4),
    TwoTowerConfig(
        user_features=["user_id", "user_group"], item_features=["item_id", "item_genre"], user_layer_sizes=[16, 8],
        item_layer_sizes=[8], recall_at=[5],
    ),
    TwoTowerConfig(user_layer_sizes=[8], item_layer_sizes=[8], log_q_correction=False, normalize=False, temperature=1.0, hard_negatives=3),
    # Their batch norm is over both ranks; dropout would draw other numbers on each.
    DeepFMConfig(hidden_layer_sizes=[16], dropout=0.0),
    XDeepFMConfig(hidden_layer_sizes=[16], cin_layer_sizes=[4], dropout=0.0),
    DCNConfig(hidden_layer_sizes=[16], dropout=0.0),
    DCNv2Config(hidden_layer_sizes=[16], cross="mixture", low_rank=4, num_experts=2, dropout=0.0),
    GDCNConfig(hidden_layer_sizes=[16], dropout=0.0),
    FinalNetConfig(first_layer_sizes=[16], second_layer_sizes=[8], dropout=0.0),
    WukongConfig(
        num_layers=2, num_fm_vectors=4, num_linear_vectors=4, rank=4, fm_layer_sizes=[16], hidden_layer_sizes=[16],
        dropout=0.0, activation="gelu",  # a unit of relu that bf16 moves across 0 changes the steps after it
    ),
]  # fmt: skip
NUM_STEPS, GLOBAL_BATCH = 4, 32


def _dataset() -> Dataset:
    features = [
        SparseFeature(name, size, False, 1.0, FrequencyCurve([1, size // 4, size], [0.3, 0.7, 1.0]))
        for name, size in SIZES.items()
    ]
    return Dataset("drawn", "click", ["age", "hour"], features, {"train": Split([], 100, 50)}, 100, 100, 0, "none")


def _task(config: ModelConfig, precision: str = "fp32") -> tuple[TaskModel, list[Table]]:
    """Wide&Deep gets tables of two dims."""
    # Rows large enough for products of theirs to move what they touch.
    per_table = {"default": TableConfig(embedding_dim=8, init=InitConfig("normal", 0.5))}
    if isinstance(config, WideDeepConfig):
        per_table["item_id"] = TableConfig(embedding_dim=16)
    tables = resolve_tables(per_table, _dataset())
    config.check_tables(tables, 2)
    return make_task(config, build_model(config, tables, 2), tables, precision=precision), used_tables(config, tables)


def _batch(number: int, rank: int, world_size: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    share = GLOBAL_BATCH // world_size
    mine = slice(rank * share, (rank + 1) * share)
    dense = torch.randn(GLOBAL_BATCH, 2, generator=generator)
    labels = torch.randint(0, 2, (GLOBAL_BATCH,), generator=generator).float()
    weights = (torch.rand(GLOBAL_BATCH, generator=generator) > 0.1).float()
    ids = torch.cat([torch.randint(0, size, (GLOBAL_BATCH,), generator=generator)[mine] for size in SIZES.values()])
    features = keyed_jagged_tensor(list(SIZES), ids, torch.ones(len(ids)), share, [share] * len(SIZES))
    return Batch(dense[mine], features, labels[mine], weights[mine])


def _train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss, _ = model(_batch(number, rank, dist.get_world_size()))
        loss.backward()
        optimizer.step()


def _sharded(rank: int, configs: list[ModelConfig], precision: str = "fp32") -> list[dict[str, torch.Tensor]]:
    context, weights = init_distributed(), []
    for config in configs:
        task, tables = _task(config, precision)
        apply_sparse_optimizer(task, OPTIMIZERS.sparse)
        makers = {
            "row_wise": sharding_plan.row_wise,
            "data_parallel": sharding_plan.data_parallel,
            "table_wise": lambda: sharding_plan.table_wise(rank=1),
            "column_wise": lambda: sharding_plan.column_wise(ranks=[1, 0]),
        }
        plan = sharding_plan.construct_module_sharding_plan(
            task.get_submodule(PATH),
            {table.name: makers[kind]() for table, kind in zip(tables, KINDS, strict=False)},
            sharder=make_sharders(CommsConfig())[0],
            local_size=2,
            world_size=2,
            device_type="cpu",
        )
        model = shard_model(task, ShardingPlan({PATH: plan}), CommsConfig(), context)
        _train(rank, model, build_optimizer(model, OPTIMIZERS))
        weights.append(full_weights(model))
    return weights


def _whole(rank: int, configs: list[ModelConfig]) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """(first, last) weights of plain torch in one process."""
    found = []
    for config in configs:
        task, _ = _task(config)
        task.get_submodule(PATH).to_empty(device="cpu")
        initialize_tables(task, 0)
        first = {name: value.clone() for name, value in task.state_dict().items()}
        tables = [value for name, value in task.named_parameters() if "embedding_bags" in name]
        layers = [value for name, value in task.named_parameters() if "embedding_bags" not in name]
        groups = [{"params": tables, "lr": OPTIMIZERS.sparse.lr}, {"params": layers, "lr": OPTIMIZERS.dense.lr}]
        _train(rank, task, torch.optim.SGD(groups))
        found.append((first, {name: value.detach().clone() for name, value in task.state_dict().items()}))
    return found


def test_sharded_steps_equal_unsharded_steps_for_every_model(ranks: RankPool) -> None:
    sharded, whole = ranks.run(2, _sharded, CONFIGS)[0], ranks.run(1, _whole, CONFIGS)[0]
    for config, mine, (first, last) in zip(CONFIGS, sharded, whole, strict=True):
        assert mine.keys() == last.keys(), config.kind
        moved = max(float((last[name] - first[name]).abs().max()) for name in last)
        difference = max(float((mine[name] - last[name]).abs().max()) for name in last)
        print(f"{config.kind} {getattr(config, 'variant', '')}: moved by {moved:.2f}, differs by {difference:.1e}")
        assert moved > 0.01 and difference < 1e-4 * moved, config.kind


@pytest.mark.long
def test_bf16_stays_close_to_fp32_for_every_model(ranks: RankPool) -> None:
    half, whole = ranks.run(2, _sharded, CONFIGS, "bf16")[0], ranks.run(1, _whole, CONFIGS)[0]
    for config, mine, (first, last) in zip(CONFIGS, half, whole, strict=True):
        moved = sum(float((last[name] - first[name]).square().sum()) for name in last) ** 0.5
        difference = sum(float((mine[name] - last[name]).square().sum()) for name in last) ** 0.5
        print(f"{config.kind} {getattr(config, 'variant', '')}: {difference / moved:.1e} of the way")
        assert difference < 0.1 * moved, config.kind


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MatrixFactorizationConfig(user_feature="user"), "model.user_feature user_"),
        (MatrixFactorizationConfig(item_feature="user_id"), "user_id"),
        (NCFConfig(gmf_dim=8), "embedding_dim=8"),
        (TwoTowerConfig(item_features=["item_id", "user_id"]), "user_id"),
        (TwoTowerConfig(user_features=["age"]), "model.user_features age"),
    ],
    ids=["unknown", "twice", "gmf_dim", "both sides", "dense"],
)
def test_features_and_dims_that_do_not_fit_are_refused_by_the_key_that_names_them(
    config: ModelConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=names(message)):
        config.check_tables(resolve_tables({"default": TableConfig(embedding_dim=8)}, _dataset()), 2)


def test_towers_that_end_apart_and_empty_sides_are_refused() -> None:
    with pytest.raises(ConfigError):
        TwoTowerConfig(user_layer_sizes=[8], item_layer_sizes=[4])
    with pytest.raises(ConfigError, match=names("model.user_features")):
        TwoTowerConfig(user_features=[])
    with pytest.raises(ConfigError, match=names("model.variant=neumf")):
        NCFConfig(variant="gmf", gmf_dim=4)
    assert DeepFMConfig().metrics[0] == "ne" and TwoTowerConfig().metrics[0] == "recall_at_10"
