"""Each registered click model at a size for tests, with data that is categorical, dense or both; a new model is among them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import sharding_plan
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.config.model import LayersConfig, ModelConfig, used_tables
from pipeline.config.registry import components
from pipeline.config.tables import InitConfig, TableConfig
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.table import Table
from pipeline.embeddings.tables import resolve_tables
from pipeline.extras.models.histories import HistoryConfig
from pipeline.extras.models.sequence_encoders import SequenceEncodersConfig
from pipeline.models.build import build_model
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.sharding.torchrec.table_init import initialize_tables
from pipeline.training.optimizer import TrainingOptimizer, build_optimizer
from tests.support.datasets import described_dataset
from tests.support.exchange_paths import default_comms
from tests.support.optimizers import ROWWISE

SIZES = {"user_id": 23, "item_id": 17, "hour": 5, "genre": 7}
NUM_DENSE, DIM, WIDEST = 3, 8, 20
# What of the data a model reads; a model that is not named here takes all three.
DATA = {"categorical": (SIZES, 0), "dense": ({}, NUM_DENSE), "both": (SIZES, NUM_DENSE)}
# Models that are over pairs of ids, or over dense features, by their very definition; what they cannot take they refuse.
REFUSED = {
    "dense": ["dlrm", "dlrm_dcn", "matrix_factorization", "ncf", "simple_deepfm"],
    "categorical": ["simple_deepfm"],
}
WITHOUT_LAYERS: list[str] = []  # that trainer.compile could compile
# Forms of a model beside its default.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "masknet": [{"variant": "parallel", "feature_norm": True}],
    "dcnv2": [{"structure": "stacked", "cross": "low_rank"}],
    "gdcn": [{"structure": "stacked"}],
    "autoint": [{"hidden_layer_sizes": []}, {"dense_features": "values"}],
    "finalnet": [{"second_layer_sizes": [], "combine": "sum", "feature_gates": False}],
    "finalmlp": [{"first_context": ["user_id"], "second_context": ["item_id", "hour"], "dense_features": "values"}],
}
HISTORY_MODELS = (HistoryConfig, SequenceEncodersConfig)  # of sequences: tests/extras/models
CLICK_MODELS = [
    kind
    for kind, config in components("model").items()
    if config.__module__.startswith("pipeline.")
    and config().task in ("click", "distilled_streams")
    and not issubclass(config, HISTORY_MODELS)
]


def small(kind: str, **settings: Any) -> ModelConfig:
    """A model's default config with no layer wider than WIDEST, with dropout, and batch norm where it has a norm to choose."""
    kept = components("model")[kind]
    default, given = kept(), {}
    for field in dataclasses.fields(kept):
        value = getattr(default, field.name)
        if isinstance(value, list) and value and isinstance(value[0], int):
            given[field.name] = [min(size, WIDEST) for size in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            given[field.name] = min(value, WIDEST)
    if isinstance(default, LayersConfig):
        given |= {"dropout": 0.2, "batch_norm": True, "layer_norm": False}
    return kept(**{**given, **settings})


def tables_of(sizes: dict[str, int]) -> list[Table]:
    default = TableConfig(embedding_dim=DIM, init=InitConfig("normal", 0.3))
    return resolve_tables({"default": default}, described_dataset(sizes, NUM_DENSE))


def build(
    config: ModelConfig, data: str = "both", precision: str = "fp32", seed: int = 0
) -> tuple[TaskModel, list[Table]]:
    """The task with tables on meta, and the tables that the model reads."""
    sizes, num_dense = DATA[data]
    tables = tables_of(sizes)
    task = make_task(config, build_model(config, tables, num_dense, seed=seed), tables, precision=precision)
    return task, used_tables(config, tables)


def materialize(task: nn.Module) -> nn.Module:
    """Tables in memory, for one process without sharding."""
    for module in task.modules():
        if any(weight.is_meta for weight in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
    initialize_tables(task, 0)
    return task


def batch(number: int, data: str = "both", num_rows: int = 32, rank: int = 0, world_size: int = 1) -> Batch:
    """This rank's rows of global batch `number`; a click depends on two of the ids and a dense feature."""
    sizes, num_dense = DATA[data]
    generator = torch.Generator().manual_seed(number)
    ids = {name: torch.randint(0, size, (num_rows,), generator=generator) for name, size in SIZES.items()}
    dense = torch.randn(num_rows, NUM_DENSE, generator=generator)
    labels = ((ids["user_id"] + ids["item_id"]) % 3 == 0) ^ (dense[:, 0] > 0.5)
    mine = slice(rank * num_rows // world_size, (rank + 1) * num_rows // world_size)
    count = len(labels[mine])
    values = torch.cat([ids[name][mine] for name in sizes]) if sizes else torch.empty(0, dtype=torch.int64)
    features = keyed_jagged_tensor(list(sizes), values, torch.ones(len(values)), count, [count] * len(sizes))
    return Batch(dense[mine, :num_dense], features, labels[mine].float(), torch.ones(count))


def shard(config: ModelConfig, seed: int = 0) -> tuple[DistributedModelParallel, TrainingOptimizer, DistributedContext]:
    """Collective: over both kinds of features, with a table by rows, one on the last rank, and one on every rank."""
    context = init_distributed()
    task, tables = build(config, seed=seed)
    apply_sparse_optimizer(task, ROWWISE.sparse)
    sharders, plan = make_sharders(default_comms(), seed), ShardingPlan({})
    for path, module in task.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            plan.plan[path] = sharding_plan.construct_module_sharding_plan(
                module,
                {table.name: _placement(number, context.world_size) for number, table in enumerate(tables)},
                sharder=sharders[0],
                local_size=context.world_size,
                world_size=context.world_size,
                device_type="cpu",
            )
    model = shard_model(task, plan, default_comms(), context, seed=seed)
    return model, build_optimizer(model, ROWWISE), context


def _placement(number: int, world_size: int) -> Any:
    kinds = [
        sharding_plan.row_wise(),
        sharding_plan.table_wise(rank=world_size - 1),
        sharding_plan.data_parallel(),
        sharding_plan.row_wise(),
    ]
    return kinds[number % len(kinds)]


def train_steps(rank: int, model: DistributedModelParallel, optimizer: TrainingOptimizer, steps: range) -> None:
    """Over this rank's rows of the global batches numbered `steps`."""
    model.train()
    for number in steps:
        optimizer.zero_grad()
        model(batch(number, rank=rank, world_size=dist.get_world_size()))[0].backward()
        optimizer.step()
