"""A model small enough to train sharded and unsharded side by side, with plans by table and batches by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan, ShardMetadata
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.optimizers import OptimizerConfig
from pipeline.config.training import CommsConfig
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import TrainingOptimizer, build_optimizer
from tests.support.exchange_paths import default_comms

TABLES = "embedding_bag_collection"
META = torch.device("meta")


@dataclass(frozen=True)
class TinyTable:
    """`kind` is the sharding type that the plan gives it. Where one table is weighted all batches have weights."""

    name: str
    kind: str = "table_wise"
    pooling: str = "sum"
    features: tuple[str, ...] = ()
    num_embeddings: int = 53
    embedding_dim: int = 8
    data_type: DataType = DataType.FP32
    init: Callable[[torch.Tensor], torch.Tensor] | None = None
    weighted: bool = False

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self.features or (f"f_{self.name}",)


class TinyModel(nn.Module):
    """Pooled embeddings, read by key, through a small MLP: forward(batch) -> (loss, logits)."""

    def __init__(self, tables: list[TinyTable], device: torch.device = META, init_scale: float = 0.5) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
                pooling=PoolingType.SUM if table.pooling == "sum" else PoolingType.MEAN,
                data_type=table.data_type,
                init_fn=table.init or (lambda weight: nn.init.uniform_(weight, -init_scale, init_scale)),
            )
            for table in tables
        ]
        self.embedding_bag_collection = EmbeddingBagCollection(
            tables=configs, device=device, is_weighted=any(table.weighted for table in tables)
        )
        self.keys = [feature for table in tables for feature in table.feature_names]
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.over = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, features: KeyedJaggedTensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.embedding_bag_collection(features)
        logits = self.over(torch.cat([pooled[key] for key in self.keys], dim=1)).squeeze(1)
        # A steep loss, so that a few steps move the weights far.
        return F.binary_cross_entropy_with_logits(4 * logits, labels), logits


def context(rank: int) -> DistributedContext:
    size = dist.get_world_size()
    return DistributedContext(rank, size, rank, size, torch.device("cpu"), "gloo")


def plan_of(model: nn.Module, tables: list[TinyTable], local_size: int = 0) -> ShardingPlan:
    """For a model that holds `tables` as embedding_bag_collection: each as its `kind` says, table_wise ones in turn."""
    world_size = dist.get_world_size()
    local_size = local_size or world_size
    generators = {}
    for index, table in enumerate(tables):
        rank, host = index % world_size, index % (world_size // local_size)
        generators[table.name] = {
            "table_wise": lambda rank=rank: sharding_plan.table_wise(rank=rank),
            "row_wise": sharding_plan.row_wise,
            "column_wise": lambda: sharding_plan.column_wise(ranks=list(reversed(range(world_size)))),
            "table_column_wise": lambda: sharding_plan.column_wise(ranks=list(range(world_size))),
            "data_parallel": sharding_plan.data_parallel,
            "table_row_wise": lambda host=host: sharding_plan.table_row_wise(host_index=host),
            "grid_shard": lambda: _grid_shard(local_size),
        }[table.kind]()
    plan = sharding_plan.construct_module_sharding_plan(
        model.get_submodule(TABLES),
        generators,
        sharder=make_sharders(CommsConfig())[0],
        local_size=local_size,
        world_size=world_size,
        device_type="cpu",
    )
    for table in tables:
        plan[table.name].sharding_type = table.kind  # table_column_wise has no generator of its own
    return ShardingPlan({TABLES: plan})


def _grid_shard(local_size: int) -> Callable[..., ParameterSharding]:
    """Columns over hosts, rows over the ranks of a host; TorchRec's own generator cuts no table narrower than 128."""

    def generate(weight: nn.Parameter, *_: object) -> ParameterSharding:
        (rows, columns), world_size = weight.shape, dist.get_world_size()
        width, height = columns // (world_size // local_size), -(-rows // local_size)
        shards = []
        for rank in range(world_size):
            host, row = rank // local_size, rank % local_size * height
            size = [min(height, rows - row), width]
            shards.append(ShardMetadata([row, host * width], size, placement=f"rank:{rank}/cpu"))
        return ParameterSharding(
            "grid_shard", "fused", list(range(world_size)), sharding_spec=EnumerableShardingSpec(shards)
        )

    return generate


def build(
    rank: int,
    tables: list[TinyTable],
    optimizer: OptimizerConfig,
    comms: CommsConfig | None = None,
    local_size: int = 0,
    seed: int = 3,
) -> tuple[DistributedModelParallel, TrainingOptimizer]:
    model = TinyModel(tables)
    apply_sparse_optimizer(model, optimizer.sparse)
    plan = plan_of(model, tables, local_size)
    sharded = shard_model(model, plan, comms or default_comms(), context(rank), seed=seed)
    return sharded, build_optimizer(sharded, optimizer)


def refusal_of_build(rank: int, tables: list[TinyTable], optimizer: OptimizerConfig) -> str:
    with pytest.raises(ValueError) as error:
        build(rank, tables, optimizer)
    return str(error.value)


def batches(
    tables: list[TinyTable], num_steps: int, rank: int = 0, world_size: int = 1, batch_size: int = 32, longest: int = 4
) -> Iterator[tuple[KeyedJaggedTensor, torch.Tensor]]:
    """This rank's part of the same global batches: multi-hot bags of 0 to `longest` ids."""
    generator = torch.Generator().manual_seed(11)
    rows = [table.num_embeddings for table in tables for _ in table.feature_names]
    keys = [feature for table in tables for feature in table.feature_names]
    mine = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
    for _ in range(num_steps):
        lengths = torch.randint(0, longest + 1, (len(keys), batch_size), generator=generator, dtype=torch.int32)
        ids = [torch.randint(0, rows[i], (int(lengths[i].sum()),), generator=generator) for i in range(len(keys))]
        labels = torch.randint(0, 2, (batch_size,), generator=generator).float()
        parts = [torch.split(ids[i], lengths[i].tolist())[mine] for i in range(len(keys))]
        values = torch.cat([part for feature in parts for part in feature])
        weights = None
        if any(table.weighted for table in tables):  # of both signs
            drawn = [torch.rand(len(each), generator=generator) * 3 - 1 for each in ids]
            own = [torch.split(drawn[i], lengths[i].tolist())[mine] for i in range(len(keys))]
            weights = torch.cat([part for feature in own for part in feature])
        yield KeyedJaggedTensor(keys, values, weights, lengths=lengths[:, mine].reshape(-1)), labels[mine]


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collective: every parameter whole, on every rank."""
    return {name: full_tensor(value) for name, value in model.state_dict().items()}


def full_tensor(value: torch.Tensor | ShardedTensor) -> torch.Tensor:
    if not isinstance(value, ShardedTensor):
        return value.detach().clone()
    whole = torch.zeros(value.size(), dtype=value.dtype)
    for shard in value.local_shards():
        place = tuple(
            slice(first, first + size)
            for first, size in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        )
        whole[place] = shard.tensor.detach()
    dist.all_reduce(whole)
    return whole
