"""Step the optimizer of replicated (data_parallel) tables on CPU by one kernel call instead of one a table.

TorchRec keeps such tables as slices of one flat parameter. torch's optimizers go from slice to slice in Python, which for
two dozen small tables took longer than their whole forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from pipeline.config.optimizers import all_optimizers

# torch's optimizer of replicated tables -> its number in our kernels.
KINDS: dict[type[torch.optim.Optimizer], int] = {
    entry().replicated(): entry.cpu_kernel for entry in all_optimizers().values() if entry.cpu_kernel is not None
}
STATE = "sum"  # Adagrad's state, as torch optimizers name it
PLAIN = ("weight_decay", "momentum", "nesterov", "dampening", "lr_decay", "maximize")  # settings that the kernel lacks


@dataclass(frozen=True)
class _Block:
    """One flat parameter: its tables' rows and widths in order, and their states in one array."""

    weights: torch.Tensor
    rows: np.ndarray[Any, Any]
    dims: np.ndarray[Any, Any]
    states: torch.Tensor


class FlatUpdate:
    """Steps a torch optimizer whose parameters are the tables of flat parameters, each of them whole."""

    def __init__(self, optimizer: torch.optim.Optimizer, blocks: list[_Block], update: Callable[..., None]) -> None:
        self._optimizer, self._blocks, self._update = optimizer, blocks, update

    def clear_gradients(self) -> None:
        for block in self._blocks:
            block.weights.grad = None  # and with it the slices'

    def step(self) -> None:
        """As optimizer.step(), but for its count of steps, on which none of these optimizers' updates depends."""
        (group,) = self._optimizer.param_groups
        kind = KINDS[type(self._optimizer)]
        for block in self._blocks:
            gradient = block.weights.grad
            if gradient is not None:
                self._update(
                    block.weights.detach().numpy(), gradient.contiguous().numpy(), block.states.numpy(), block.rows,
                    block.dims, kind, np.float32(group["lr"]), np.float32(group.get("eps", 0.0)),
                )  # fmt: skip


def flat_update(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> FlatUpdate | None:
    """None where the kernel does not support the optimizer. Its states become views of one array: load them in place."""
    if type(optimizer) not in KINDS or len(optimizer.param_groups) != 1:
        return None
    if any(optimizer.param_groups[0].get(name) for name in PLAIN):
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
        from pipeline.sharding.kernels.update_kernels import update_rows
    except ImportError:  # no Numba
        return None
    return FlatUpdate(optimizer, [_block(tables, optimizer) for tables in groups], update_rows)


def _is_whole(tables: list[TableBatchedEmbeddingSlice]) -> bool:
    flat = tables[0]._original_tensor
    ends = [0, *(table._end_offset for table in tables)]
    return (
        flat.device.type == "cpu"
        and flat.dtype == torch.float32
        and all(table._start_offset == end for table, end in zip(tables, ends, strict=False))
        and ends[-1] == flat.numel()
    )


def _block(tables: list[TableBatchedEmbeddingSlice], optimizer: torch.optim.Optimizer) -> _Block:
    own = [optimizer.state[table][STATE] for table in tables if STATE in optimizer.state[table]]
    states = torch.cat([state.reshape(-1) for state in own]) if own else torch.empty(0)
    parts = states.split([state.numel() for state in own])
    for table, state, part in zip(tables, own, parts, strict=False):  # without states: none of them
        optimizer.state[table][STATE] = part.view(state.shape)
    rows, dims = (np.array([table.shape[axis] for table in tables], dtype=np.int64) for axis in (0, 1))
    return _Block(tables[0]._original_tensor, rows, dims, states)
