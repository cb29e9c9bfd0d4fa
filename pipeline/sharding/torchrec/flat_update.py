"""Update replicated (data_parallel) tables on CPU with one kernel call.

TorchRec stores such tables as slices of one flat parameter. torch's optimizers visit the slices one
by one in Python, which for two dozen small tables took longer than the complete forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.optim import RowWiseAdagrad

from pipeline.devices.base import in_host_memory
from pipeline.sharding.torchrec.update_rule import ADAGRAD, ROWWISE_ADAGRAD, SGD, STATES, TouchedRows, UpdateRule

# torch's optimizer of replicated tables and its number in our kernels.
KINDS: dict[type[torch.optim.Optimizer], int] = {
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: ADAGRAD,
    RowWiseAdagrad: ROWWISE_ADAGRAD,
}
# settings that the kernel lacks
PLAIN = ("weight_decay", "momentum", "nesterov", "dampening", "lr_decay", "maximize")


@dataclass(frozen=True)
class _Block:
    """Hold one flat parameter. Arrays have one entry per table; a state of all tables is one array.

    Its tables are in one group of the optimizer, so `rule` differs between them only in l2 and
    all_rows.
    """

    group: dict[str, Any]
    rule: UpdateRule
    tables: list[int]  # the id() of each table's weight
    weights: torch.Tensor
    rows: np.ndarray[Any, Any]
    dims: np.ndarray[Any, Any]
    l2s: np.ndarray[Any, Any]
    every: np.ndarray[Any, Any]  # whether untouched rows are updated too
    states: list[torch.Tensor]  # two; empty if the optimizer has fewer states


class FlatUpdate:
    """Replace the step of an optimizer whose parameters are tables, all stored in flat parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, blocks: list[_Block], update: Callable[..., None]) -> None:
        self._optimizer, self._blocks, self._update = optimizer, blocks, update
        self._marks = [np.empty(0, np.uint8) for _ in blocks]

    def track_rows(self) -> dict[int, np.ndarray[Any, Any]]:
        """Keep a byte per row, which is 1 if the row is updated. Return id() of a table's weight -> its bytes."""
        self._marks = [np.zeros(int(block.rows.sum()), np.uint8) for block in self._blocks]
        found: dict[int, np.ndarray[Any, Any]] = {}
        for block, marks in zip(self._blocks, self._marks, strict=True):
            found |= dict(zip(block.tables, np.split(marks, np.cumsum(block.rows)[:-1]), strict=True))
        return found

    def clear_gradients(self) -> None:
        for block in self._blocks:
            block.weights.grad = None  # also removes the gradients of the slices

    def step(self) -> None:
        """Make one step as optimizer.step() does. TouchedRows also needs the number of the step."""
        optimizer, step = self._optimizer, 1
        if isinstance(optimizer, TouchedRows):
            optimizer.num_steps += 1
            step = optimizer.num_steps
        for block, marks in zip(self._blocks, self._marks, strict=True):
            gradient, rule = block.weights.grad, block.rule
            if gradient is not None:
                self._update(
                    block.weights.detach().numpy(), gradient.contiguous().numpy(), *(state.numpy() for state in block.states),
                    block.rows, block.dims, rule.kind, rule.numbers(block.group["lr"], step), block.l2s, block.every, marks,
                )  # fmt: skip


def flat_update(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> FlatUpdate | None:
    """Return the update, or None if the kernel lacks the optimizer. States become views: load values in place."""
    rules = _rules(optimizer)
    if not rules:
        return None
    flats: dict[int, list[TableBatchedEmbeddingSlice]] = {}
    for weight in params.values():
        if not isinstance(weight, TableBatchedEmbeddingSlice):
            return None
        flats.setdefault(id(weight._original_tensor), []).append(weight)
    groups = [sorted(tables, key=lambda table: table._start_offset) for tables in flats.values()]
    if not all(map(_is_whole, groups)):
        return None
    try:
        from pipeline.devices.cpu.kernels.update import update_rows
    except ImportError:  # no Numba
        return None
    blocks = [_block(tables, optimizer, rules) for tables in groups]
    return FlatUpdate(optimizer, blocks, update_rows)


def _rules(optimizer: torch.optim.Optimizer) -> dict[int, UpdateRule]:
    """Return id() of each weight -> its rule; empty if unsupported."""
    if isinstance(optimizer, TouchedRows):
        return {id(weight): rule for weight, rule in optimizer.rules.items()}
    groups = optimizer.param_groups
    if type(optimizer) not in KINDS or any(group.get(name) for group in groups for name in PLAIN):
        return {}
    kind = KINDS[type(optimizer)]
    return {id(weight): UpdateRule(kind, group.get("eps", 0.0)) for group in groups for weight in group["params"]}


def _is_whole(tables: list[TableBatchedEmbeddingSlice]) -> bool:
    flat = tables[0]._original_tensor
    ends = [0, *(table._end_offset for table in tables)]
    return (
        in_host_memory(flat)
        and flat.dtype == torch.float32
        and all(table._start_offset == end for table, end in zip(tables, ends, strict=False))
        and ends[-1] == flat.numel()
    )


def _block(
    tables: list[TableBatchedEmbeddingSlice], optimizer: torch.optim.Optimizer, rules: Mapping[int, UpdateRule]
) -> _Block:
    rule = rules[id(tables[0])]
    (group,) = (group for group in optimizer.param_groups if any(each is tables[0] for each in group["params"]))
    joined = [_joined(tables, optimizer, name) for name in STATES.get(rule.kind, {})]
    states = [*joined, torch.empty(0), torch.empty(0)][:2]
    rows, dims = (np.array([table.shape[axis] for table in tables], dtype=np.int64) for axis in (0, 1))
    l2s = np.array([rules[id(table)].l2 for table in tables], dtype=np.float32)
    every = np.array([rules[id(table)].all_rows for table in tables], dtype=np.int64)
    return _Block(
        group, rule, [id(table) for table in tables], tables[0]._original_tensor, rows, dims, l2s, every, states
    )


def _joined(tables: list[TableBatchedEmbeddingSlice], optimizer: torch.optim.Optimizer, name: str) -> torch.Tensor:
    """Join the states with one name of all tables to one array. The optimizer then holds views of this array."""
    own = [optimizer.state[table][name] for table in tables]
    whole = torch.cat([state.reshape(-1) for state in own])
    for table, state, part in zip(tables, own, whole.split([state.numel() for state in own]), strict=True):
        optimizer.state[table][name] = part.view(state.shape)
    return whole
