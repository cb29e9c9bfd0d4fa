"""A model of frequency_split tables whose heads are replicated and whose tails are sharded as asked, and the same unsplit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.tables import CompressionConfig
from pipeline.config.training import CommsConfig
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.table import Table
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import TrainingOptimizer, build_optimizer
from tests.embeddings import references
from tests.embeddings.compressed import (
    BATCH_SIZE,
    DIM,
    NUM_IDS,
    NUM_STEPS,
    PooledModel,
    as_features,
    sample_bags,
    steep_loss,
    table_of,
)

SEED = 3
HEAD = 20
PATH = "embeddings.embedding_bag_collection"
HASHED_ROWS = 9


def split(head_rows: int, **settings: Any) -> CompressionConfig:
    return CompressionConfig("frequency_split", head_rows=str(head_rows), **settings)


def make_tables() -> list[Table]:
    tail = CompressionConfig("hash", num_rows=HASHED_ROWS, seed=4)
    return [
        table_of("plain", None),
        table_of("sum", split(HEAD)),
        table_of("mean", split(HEAD), "mean"),
        table_of("all", split(NUM_IDS)),
        table_of("none", split(0)),
        table_of("sent", split(HEAD, skip_empty_bags=False)),
        table_of("hashed", split(HEAD, tail=tail), "mean"),
    ]


def optimizers(name: str) -> OptimizerConfig:
    """eps is large, for Adagrad's first step divides a gradient by itself: of one that cancels out only rounding is left."""
    return OptimizerConfig(SparseOptimizerConfig(name, lr=0.1, eps=0.01), DenseOptimizerConfig("adam", lr=0.01))


def build(
    tables: list[Table], kind: str, config: OptimizerConfig
) -> tuple[DistributedModelParallel, TrainingOptimizer]:
    """Collective."""
    context = init_distributed()
    model = PooledModel(tables)
    apply_sparse_optimizer(model, config.sparse)
    collection: Any = model.get_submodule(PATH)
    makers: dict[str, Any] = {
        "table_wise": lambda index: table_wise(rank=index % context.world_size),
        "row_wise": lambda _: row_wise(),
        "column_wise": lambda _: column_wise(ranks=list(range(context.world_size))),
        "data_parallel": lambda _: data_parallel(),
    }
    plan = construct_module_sharding_plan(
        collection,
        {
            config.name: makers["data_parallel" if config.name.endswith("__hot") else kind](index)
            for index, config in enumerate(collection.embedding_bag_configs())
        },
        sharder=make_sharders(CommsConfig())[0],
        local_size=context.local_world_size,
        world_size=context.world_size,
        device_type="cpu",
    )
    sharded = shard_model(model, ShardingPlan({PATH: plan}), CommsConfig(), context, seed=SEED)
    return sharded, build_optimizer(sharded, config)


def split_batches(tables: list[Table], steps: range) -> Any:
    """This rank's part of the global batches, with ids split and empty bags left out."""
    splitter, share = IdSplitter(tables, skip_empty_bags=True), BATCH_SIZE // dist.get_world_size()
    local = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    for step in steps:
        bags, labels = sample_bags(tables, step)
        yield splitter(as_features(bags, local)), labels[local]


def train(model: Any, optimizer: Any, tables: list[Table], steps: range) -> list[float]:
    """Collective: the mean loss over ranks of each step."""
    losses = []
    for features, labels in split_batches(tables, steps):
        optimizer.zero_grad()
        loss, _ = model(features, labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def whole_rows(tables: list[Table], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By logical table its rows, the head's and the tail's below each other; the hashed tail by its own name."""
    parts = {name.split(".")[-2]: value for name, value in weights.items() if "embedding_bags" in name}
    found = {}
    for table in tables:
        own = [parts[name] for name in (table.name, f"{table.name}__hot", f"{table.name}__cold") if name in parts]
        found[table.name] = torch.cat(own)
    return {**found, "hashed__cold__hash": parts["hashed__cold__hash"]}


def train_unsplit(
    tables: list[Table], first: dict[str, torch.Tensor], over: dict[str, torch.Tensor], config: OptimizerConfig
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Plain tensors of whole tables, one process, torch's optimizers: rows after NUM_STEPS, and losses."""
    weights = {name: value.clone().requires_grad_() for name, value in first.items()}
    dense = {name: value.clone().requires_grad_() for name, value in over.items()}
    kind: Any = {"adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}[config.sparse.name]
    steps = [
        kind(list(weights.values()), lr=config.sparse.lr, eps=config.sparse.eps),
        torch.optim.Adam(dense.values(), lr=config.dense.lr, eps=config.dense.eps),
    ]
    cold_row = references.hashed("hashed__cold", HASHED_ROWS, 4)

    def row_of(table: Table) -> references.RowOf:
        if table.name != "hashed":
            return lambda own, id_: own[table.name][id_]
        return lambda own, id_: own["hashed"][id_] if id_ < HEAD else cold_row(own, id_ - HEAD)

    losses = []
    for step in range(NUM_STEPS):
        bags, labels = sample_bags(tables, step)
        columns = [
            references.pool(row_of(table), weights, bags[feature], table.pooling, DIM)
            for table in tables
            for feature in table.feature_names
        ]
        logits = torch.cat(columns, dim=1) @ dense["over.weight"].T + dense["over.bias"]
        loss, _ = steep_loss(logits.squeeze(1), labels)
        for optimizer in steps:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in steps:
            optimizer.step()
        losses.append(loss.item())
    return {name: value.detach() for name, value in weights.items()}, losses
