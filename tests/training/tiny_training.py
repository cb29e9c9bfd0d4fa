"""Train the tiny model sharded and unsharded on the same global batches, and say how far apart they end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.optim import RowWiseAdagrad

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.config.data import ReaderConfig
from pipeline.config.optimizers import OptimizerConfig
from pipeline.config.training import CheckpointConfig, CommsConfig, LRSchedule, ScheduleConfig, TrainerConfig
from pipeline.data.read.batch import Batch
from pipeline.runtime.logs import MetricsWriter
from pipeline.sharding.torchrec.table_init import initialize_tables
from pipeline.training.optimizer import apply_schedule, clip_dense_gradients, lr_factor
from pipeline.training.trainer import FitResult
from tests.support.sharded_models import build_sharded, digest, draw_batches
from tests.support.trainers import make_trainer
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


KINDS = {"a": "table_wise", "b": "row_wise", "c": "data_parallel", "d": "table_wise"}
STEPS_PER_EPOCH = 6
CONFIG = TrainerConfig(global_batch_size=32, epochs=2, log_every_steps=4)
SCHEDULE = ScheduleConfig(
    sparse=LRSchedule("poly", warmup_steps=3, decay_start_step=4, decay_steps=20), dense=LRSchedule(warmup_steps=2)
)


class DrawnReader:
    """As much of a ShardReader as the trainer uses, over drawn batches; epochs differ."""

    def __init__(
        self, rank: int, world_size: int, global_batch_size: int = 32, nan_steps: tuple[int, ...] = ()
    ) -> None:
        self.steps_per_epoch = STEPS_PER_EPOCH * 32 // global_batch_size
        self.batch_size = global_batch_size // world_size
        self.stall_seconds = 0.0
        self.config, self.num_rows = ReaderConfig(), self.steps_per_epoch * global_batch_size
        self._rank, self._world_size, self._global, self._nan = rank, world_size, global_batch_size, nan_steps

    dataset_fingerprint, plain_features = "drawn", ()

    def positions(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        for step in range(self.steps_per_epoch):
            yield (step * self._world_size + self._rank) * self.batch_size + np.arange(self.batch_size)

    def locate(self, epoch: int, step: int, rows: list[int]) -> list[tuple[str, int]]:
        return [(f"epoch {epoch} step {step} rank {self._rank}", row) for row in rows]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        first = epoch * self.steps_per_epoch + start_step
        drawn = draw_batches(self._rank, self._world_size, self.steps_per_epoch - start_step, first, self._global)
        for number, batch in enumerate(drawn, start=first):
            if number in self._nan and self._rank == 0:
                batch.labels[0] = math.nan
            yield batch


def fit_drawn(
    rank: int,
    world_size: int,
    folder: str,
    config: TrainerConfig = CONFIG,
    save_every: int = 0,
    optimizers: OptimizerConfig | None = None,
    nan_steps: tuple[int, ...] = (),
    profiled: tuple[int, int] | None = None,
    fast_cpu: bool = True,
) -> tuple[str, FitResult]:
    """Resume from `folder` where it holds a step, train to the end; the model's digest and the result."""
    extra: dict[str, Any] = {"optimizers": optimizers} if optimizers else {}
    task, model, optimizer, context = build_sharded(KINDS, fast_cpu=fast_cpu, **extra)
    checkpointer = Checkpointer(f"{folder}/checkpoints", model, optimizer, context, keep_last_n=9)
    restored = checkpointer.restore_latest()
    micro_batch = config.global_batch_size // config.gradient_accumulation_steps
    writer = MetricsWriter(folder, restored["step"] if restored else 0) if rank == 0 else None
    checkpoint = CheckpointConfig(save_every_steps=save_every, save_every_minutes=None)
    trainer = make_trainer(
        config,
        SCHEDULE,
        checkpoint,
        f"steps:{profiled[0]}-{profiled[1]}" if profiled else None,
        folder,
        model=model,
        task=task,
        optimizer=optimizer,
        reader=DrawnReader(rank, world_size, micro_batch, nan_steps),
        writer=writer,
        validation_reader=DrawnReader(rank, world_size),
        checkpointer=checkpointer,
        context=context,
    )
    result = trainer.fit(restored)
    if writer:
        writer.close()
    return digest(model), result
