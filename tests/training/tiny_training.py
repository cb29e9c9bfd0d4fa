"""Train the tiny model sharded and unsharded on the same global batches, and say how far apart they end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchrec.optim import RowWiseAdagrad

from pipeline.config.training import CommsConfig, OptimizerConfig, ScheduleConfig
from pipeline.sharding.torchrec.table_init import initialize_tables
from pipeline.training.lr_schedule import apply_schedule, lr_factor
from pipeline.training.optimizer import clip_dense_gradients
from tests.training.tiny import TinyModel, TinyTable, batches, build, full_weights

SEED = 3
NUM_STEPS = 5


def train_unsharded(
    tables: list[TinyTable], config: OptimizerConfig, schedule: ScheduleConfig | None = None, clip: float = 0.0
) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """(weights, loss of each step, how far the least-moved table has moved) of plain torch in one process."""
    model = TinyModel(tables, torch.device("cpu"))
    initialize_tables(model, SEED)
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights, settings = list(model.embedding_bag_collection.parameters()), config.sparse
    sparse: torch.optim.Optimizer
    if settings.name == "sgd":
        sparse = torch.optim.SGD(weights, lr=settings.lr)
    elif settings.name == "adagrad":
        sparse = torch.optim.Adagrad(weights, lr=settings.lr, eps=settings.eps)
    elif settings.name == "adam":
        sparse = torch.optim.Adam(weights, lr=settings.lr, eps=settings.eps)
    else:
        sparse = RowWiseAdagrad(weights, lr=settings.lr, eps=settings.eps)
    dense = torch.optim.Adam(model.over.parameters(), lr=config.dense.lr, eps=config.dense.eps)
    losses = []
    for step, (features, labels) in enumerate(batches(tables, NUM_STEPS)):
        if schedule is not None:
            sparse.param_groups[0]["lr"] = settings.lr * lr_factor(schedule.sparse, step)
            dense.param_groups[0]["lr"] = config.dense.lr * lr_factor(schedule.dense, step)
        sparse.zero_grad()
        dense.zero_grad()
        loss, _ = model(features, labels)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.over.parameters(), clip)
        sparse.step()
        dense.step()
        losses.append(loss.item())
    last = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    moved = min(float((last[name] - first[name]).abs().max()) for name in first if "embedding_bags" in name)
    return last, losses, moved


def train_sharded(
    rank: int,
    tables: list[TinyTable],
    config: OptimizerConfig,
    comms: CommsConfig | None = None,
    local_size: int = 0,
    schedule: ScheduleConfig | None = None,
    clip: float = 0.0,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Collective: (whole weights, mean loss over ranks of each step)."""
    world_size = dist.get_world_size()
    model, optimizer = build(rank, tables, config, comms, local_size, SEED)
    losses = []
    for step, (features, labels) in enumerate(batches(tables, NUM_STEPS, rank, world_size)):
        if schedule is not None:
            apply_schedule(optimizer, schedule, step)
        optimizer.zero_grad()
        loss, _ = model(features, labels)
        loss.backward()
        if clip:
            clip_dense_gradients(model, clip)
        optimizer.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    return full_weights(model), losses


def distance(
    one: tuple[dict[str, torch.Tensor], list[float]], other: tuple[dict[str, torch.Tensor], list[float]]
) -> float:
    """The largest difference of any weight or any step's loss."""
    assert one[0].keys() == other[0].keys()
    weights = max(float((one[0][name].float() - other[0][name].float()).abs().max()) for name in one[0])
    return max(weights, *(abs(a - b) for a, b in zip(one[1], other[1], strict=True)))
