"""A model with one compressed table of each kind, each with a one-hot and a multi-hot feature, and batches for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.config.tables import CompressionConfig, ConstraintConfig, InitConfig
from pipeline.config.training import CommsConfig
from pipeline.data.read.batch import keyed_jagged_tensor
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.collection import ComposedEmbeddings, build_embeddings
from pipeline.embeddings.id_splitter import IdSplitter
from pipeline.embeddings.table import Table
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import TrainingOptimizer, build_optimizer

# Of the optimizers the one that every sharding type leaves exact.
OPTIMIZERS = OptimizerConfig(SparseOptimizerConfig("adagrad", lr=0.1), DenseOptimizerConfig("adam", lr=0.01))
NUM_IDS, DIM, LONGEST, BATCH_SIZE, NUM_STEPS = 53, 16, 4, 32, 5
Bags = list[list[int]]


def table_of(name: str, compression: CompressionConfig | None, pooling: str = "sum", num_ids: int = NUM_IDS) -> Table:
    """Features <name>_one of one id a sample (or none), and <name>_many of up to LONGEST."""
    return Table(
        name,
        num_ids,
        DIM,
        [f"{name}_one", f"{name}_many"],
        pooling,
        "fp32",
        InitConfig("normal", 0.5),
        ConstraintConfig(),
        [1.0, 2.0],
        compression=compression,
        max_ids=[1, LONGEST],
    )


class PooledModel(nn.Module):
    """Pooled embeddings, read by key, through one linear layer: forward(features, labels) -> (loss, logits)."""

    def __init__(self, tables: list[Table], device: torch.device | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.embeddings = build_embeddings(tables, device)
            self.keys = [feature for table in tables for feature in table.feature_names]
            self.over = nn.Linear(sum(table.embedding_dim * len(table.feature_names) for table in tables), 1)

    def forward(self, features: KeyedJaggedTensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.embeddings(features)
        return steep_loss(self.over(torch.cat([pooled[key] for key in self.keys], dim=1)).squeeze(1), labels)


def steep_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """So steep that a few steps move the weights far."""
    return F.binary_cross_entropy_with_logits(4 * logits, labels), logits


def sample_bags(tables: list[Table], step: int) -> tuple[dict[str, Bags], torch.Tensor]:
    """Feature -> the ids of each sample of a global batch, and the labels."""
    generator = torch.Generator().manual_seed(step)
    bags: dict[str, Bags] = {}
    for table in tables:
        for feature, longest in zip(table.feature_names, table.max_ids, strict=True):
            lengths = torch.randint(0, (longest or LONGEST) + 1, (BATCH_SIZE,), generator=generator)
            ids = torch.randint(0, table.num_embeddings, (int(lengths.sum()),), generator=generator)
            bags[feature] = [part.tolist() for part in torch.split(ids, lengths.tolist())]
    return bags, torch.randint(0, 2, (BATCH_SIZE,), generator=generator).float()


def as_features(bags: dict[str, Bags], local: slice) -> KeyedJaggedTensor:
    """As the reader makes them, before ids are split."""
    chosen = [each[local] for each in bags.values()]
    values = torch.tensor([id_ for each in chosen for bag in each for id_ in bag])
    lengths = torch.tensor([len(bag) for each in chosen for bag in each])
    return keyed_jagged_tensor(
        list(bags), values, lengths, len(chosen[0]), [sum(len(bag) for bag in each) for each in chosen]
    )


def batches(tables: list[Table], steps: range) -> Iterator[tuple[KeyedJaggedTensor, torch.Tensor]]:
    """This rank's part, with ids split."""
    world_size, splitter = dist.get_world_size(), IdSplitter(tables)
    share = BATCH_SIZE // world_size
    local = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    for step in steps:
        bags, labels = sample_bags(tables, step)
        yield splitter(as_features(bags, local)), labels[local]


def build_sharded(tables: list[Table], sharding_type: str) -> tuple[DistributedModelParallel, TrainingOptimizer]:
    """Collective. Every part of every table by one sharding type."""
    context = init_distributed()
    model = PooledModel(tables)
    apply_sparse_optimizer(model, OPTIMIZERS.sparse)
    inner = isinstance(model.embeddings, ComposedEmbeddings)
    path = "embeddings.embedding_bag_collection" if inner else "embeddings"
    collection: Any = model.get_submodule(path)
    makers = {
        "table_wise": lambda index: table_wise(rank=index % context.world_size),
        "row_wise": lambda _: row_wise(),
        "column_wise": lambda _: column_wise(ranks=list(range(context.world_size))),
        "data_parallel": lambda _: data_parallel(),
    }
    plan = construct_module_sharding_plan(
        collection,
        {config.name: makers[sharding_type](i) for i, config in enumerate(collection.embedding_bag_configs())},
        sharder=make_sharders(CommsConfig())[0],
        local_size=context.local_world_size,
        world_size=context.world_size,
        device_type="cpu",
    )
    sharded = shard_model(model, ShardingPlan({path: plan}), CommsConfig(), context, seed=3)
    return sharded, build_optimizer(sharded, OPTIMIZERS)


def train(
    model: DistributedModelParallel, optimizer: TrainingOptimizer, tables: list[Table], steps: range
) -> list[float]:
    """Collective: the mean loss over ranks of each step."""
    losses = []
    for features, labels in batches(tables, steps):
        optimizer.zero_grad()
        loss, _ = model(features, labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses
