"""Train a small model with a table of every sharding type, save it, and restore it under other plans and ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.tables import flatten, local_chunks
from pipeline.config.optimizers import DenseOptimizerConfig, OptimizerConfig, SparseOptimizerConfig
from pipeline.runtime.errors import CheckpointError
from tests.training.tiny import TinyTable, batches, build, context

TYPES = (
    "table_wise",
    "row_wise",
    "column_wise",
    "data_parallel",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
EXACT_FOR_ROW_STATE = ("table_wise", "row_wise", "data_parallel", "table_row_wise")
STEPS, BATCH = 3, 32
Values = dict[str, torch.Tensor]


def optimizers(name: str) -> OptimizerConfig:
    return OptimizerConfig(SparseOptimizerConfig(name, lr=0.1), DenseOptimizerConfig("adam", lr=0.01))


def tables(types: tuple[str, ...]) -> list[TinyTable]:
    """One table a type, 53 x 16, named t0, t1, ..."""
    return [TinyTable(f"t{index}", kind, embedding_dim=16) for index, kind in enumerate(types)]


def rotated(types: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Every table gets another type; the rotations together are all pairs."""
    return types[by % len(types) :] + types[: by % len(types)]


def save(rank: int, folder: str, types: tuple[str, ...], optimizer: str, local_size: int) -> tuple[Values, float]:
    """Collective: train STEPS, save, and take one more step; (values saved, loss of the step after)."""
    model, training = build(rank, tables(types), optimizers(optimizer), None, local_size, 5)
    _train(rank, types, model, training, 0, STEPS)
    Checkpointer(folder, model, training, context(rank)).save(STEPS)
    saved = whole(model, training)
    return saved, _train(rank, types, model, training, STEPS, 1)


def restore(
    rank: int,
    folder: str,
    types: tuple[str, ...],
    optimizer: str,
    local_size: int,
    save_in: str = "",
    average: bool = False,
) -> tuple[Values, float]:
    """Collective: restore into other first weights, save again where told; (values restored, loss of the step after)."""
    model, training = build(rank, tables(types), optimizers(optimizer), None, local_size, 77)
    Checkpointer(folder, model, training, context(rank), average_row_state=average).restore(STEPS)
    restored = whole(model, training)
    if save_in:
        Checkpointer(save_in, model, training, context(rank)).save(STEPS)
    return restored, _train(rank, types, model, training, STEPS, 1)


def refused(rank: int, folder: str, types: tuple[str, ...], optimizer: str, local_size: int) -> str:
    """Collective: what the error says, and that nothing has changed."""
    model, training = build(rank, tables(types), optimizers(optimizer), None, local_size, 77)
    before = whole(model, training)
    try:
        Checkpointer(folder, model, training, context(rank)).restore(STEPS)
    except CheckpointError as error:
        assert largest_difference(whole(model, training), before) == 0.0
        return str(error)
    return "it was restored"


def _train(rank: int, types: tuple[str, ...], model: Any, training: Any, start: int, count: int) -> float:
    """The last step's loss, the mean over ranks."""
    size = dist.get_world_size()
    drawn = batches(tables(types), start + count, rank, size, BATCH)
    loss = torch.zeros(())
    for features, labels in itertools.islice(drawn, start, None):
        training.zero_grad()
        loss, _ = model(features, labels)
        loss.backward()
        training.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
    return loss.item() / size


def whole(model: Any, training: Any) -> Values:
    """Collective: every weight and every state, put together from the parts of all ranks, on every rank."""
    mine = [
        (key, offsets, tensor.detach().clone())
        for key, value in flatten({"model": model.state_dict(), "optimizer": training.state_dict()}).items()
        for tensor, offsets in local_chunks(value)
        if tensor.numel()
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    parts: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    for key, offsets, tensor in itertools.chain(*gathered):
        parts.setdefault(key, {})[offsets] = tensor
    values = {}
    for key, pieces in parts.items():
        size = [
            max(first + length for first, length in ends)
            for ends in zip(*(zip(at, one.shape, strict=True) for at, one in pieces.items()), strict=True)
        ]
        values[key] = torch.full(size, float("nan"))
        for at, one in pieces.items():
            values[key][tuple(slice(a, a + n) for a, n in zip(at, one.shape, strict=True))] = one.float()
    return values


def largest_difference(one: Values, other: Values) -> float:
    """0.0 only where names, shapes and every bit are equal (NaN differs from all)."""
    if one.keys() != other.keys() or any(one[key].shape != other[key].shape for key in one):
        return float("inf")
    differences = [float((one[key] - other[key]).abs().max()) for key in one if one[key].numel()]
    return max(float("inf") if difference != difference else difference for difference in differences)
