"""A small sharded DLRM and batches for it, for tests that run on ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from pipeline import devices
from pipeline.config.optimizers import OptimizerConfig
from pipeline.config.tables import TableConfig
from pipeline.config.training import CommsConfig
from pipeline.data.read.batch import Batch, keyed_jagged_tensor
from pipeline.devices.process_group import init_distributed
from pipeline.embeddings.tables import resolve_tables
from pipeline.models.build import build_model
from pipeline.models.dlrm import DLRMConfig
from pipeline.models.tasks.task import TaskModel, make_task
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.sharding.torchrec.sharding import make_sharders, shard_model
from pipeline.sharding.torchrec.sparse_optimizer import apply_sparse_optimizer
from pipeline.training.optimizer import TrainingOptimizer, build_optimizer
from tests.support.datasets import described_dataset
from tests.support.exchange_paths import default_comms
from tests.support.optimizers import ROWWISE

CARDINALITIES = {"a": 50, "b": 64, "c": 33, "d": 20}
PATH = "model.sparse_arch.embedding_bag_collection"


def build_sharded(
    kinds: dict[str, str],
    optimizers: OptimizerConfig = ROWWISE,
    seed: int = 0,
    comms: CommsConfig | None = None,
    as_task: Callable[[nn.Module], nn.Module] | None = None,
    settings: dict[str, TableConfig] | None = None,
    fast_cpu: bool = True,
) -> tuple[TaskModel, DistributedModelParallel, TrainingOptimizer, DistributedContext]:
    """Collective. `kinds` maps each table of CARDINALITIES to a sharding type. Without `comms` it is that of the test's path.

    `as_task` makes the task of a DLRM that it keeps as its `model`; None: the click task. `settings`: of single tables.
    """
    comms = comms or default_comms()
    context = init_distributed(fast_cpu=fast_cpu)
    given = {"default": TableConfig(embedding_dim=8), **(settings or {})}
    tables = resolve_tables(given, described_dataset(CARDINALITIES))
    config = DLRMConfig(dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])
    model = build_model(config, tables, 2, seed=seed)
    task: TaskModel = as_task(model) if as_task else make_task(config, model, tables)
    apply_sparse_optimizer(task, optimizers.sparse)
    sharders = make_sharders(comms, seed)
    makers = {
        "table_wise": lambda: table_wise(rank=context.world_size - 1),
        "row_wise": row_wise,
        "column_wise": lambda: column_wise(ranks=[0, context.world_size - 1]),
        "data_parallel": data_parallel,
    }
    plan = construct_module_sharding_plan(
        task.get_submodule(PATH),
        {name: makers[kind]() for name, kind in kinds.items()},
        sharder=sharders[0],
        local_size=context.local_world_size,
        world_size=context.world_size,
        device_type=context.device.type,
    )
    sharded = shard_model(task, ShardingPlan({PATH: plan}), comms, context, seed=seed)
    return task, sharded, build_optimizer(sharded, optimizers), context


def draw_batches(
    rank: int, world_size: int, count: int, start: int = 0, global_batch_size: int = 32
) -> Iterator[Batch]:
    """This rank's share of global batches start .. start + count - 1, each drawn from its own number."""
    share = global_batch_size // world_size
    mine = slice(rank * share, (rank + 1) * share)
    for number in range(start, start + count):
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(global_batch_size, 2, generator=generator)
        labels = torch.randint(0, 2, (global_batch_size,), generator=generator).float()
        columns = [torch.randint(0, size, (global_batch_size,), generator=generator) for size in CARDINALITIES.values()]
        ids = torch.cat([column[mine] for column in columns])
        lengths = torch.ones(len(ids), dtype=torch.int32)
        features = keyed_jagged_tensor(list(CARDINALITIES), ids, lengths, share, [share] * len(columns))
        yield Batch(dense[mine], features, labels[mine], torch.ones(share))


def train_steps(model: DistributedModelParallel, optimizer: TrainingOptimizer, batches: Iterator[Batch]) -> list[float]:
    """This rank's losses."""
    model.train()
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full_state(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Collective: every parameter whole, on rank 0 (elsewhere sharded ones are missing)."""
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            device = devices.current().torch_device
            whole = torch.empty(value.size(), dtype=value.dtype, device=device) if dist.get_rank() == 0 else None
            value.gather(dst=0, out=whole)
            if whole is not None:
                state[name] = whole.cpu()
        else:
            state[name] = value.detach().cpu().clone()
    return state


def digest(model: DistributedModelParallel) -> str:
    """Collective: a checksum of every bit of the model, on rank 0."""
    hasher = hashlib.sha256()
    for name, value in sorted(full_state(model).items()):
        hasher.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
