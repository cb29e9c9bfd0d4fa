"""Find the tables, columns and optimizer states that the keys of a checkpoint, or of a sharded
model's state, belong to.

A table's weights are one [rows, dim] tensor under any plan. Optimizer state with a value per
element (Adagrad) has the same shape. Row-wise state ([rows]) has another shape if a plan splits
columns: TorchRec keeps one state per column block, and concatenates these states in one tensor of
[blocks * rows].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from pipeline.checkpoint.tensors import StepTensors

PREFIX = "replica_"


class Replicas(Protocol):
    """The tables of each host. `equal`: all hosts hold the same rows."""

    equal: bool

    def describe(self) -> dict[str, Any]:
        """Return the entry for the manifest. `apart`: the step holds each host's own tables in
        addition to the mean of the tables.
        """

    def state_to_save(self, state: dict[str, Any], *, average: bool = True) -> dict[str, Any]:
        """Return the state with the mean of the hosts' tables. Collective, except with `average`
        False, which only serves to count bytes.
        """

    def state_to_load(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under the keys of this host's own tables."""

    def holds_own_tables(self, manifest: Mapping[str, Any]) -> bool:
        """Return True if the step holds separate tables for each of these hosts."""


def is_replica_key(key: str) -> bool:
    return key.startswith(PREFIX)


MODEL, STATE = "model.", "optimizer.state."
TABLE_WEIGHT = re.compile(r".*\bembedding_bags\.(?P<table>[^.]+)\.weight")
TABLE_STATE = re.compile(r"(?P<weight>.*\bembedding_bags\.(?P<table>[^.]+)\.weight)\.(?P=table)\.(?P<state>\w+)")


@dataclass(frozen=True)
class Piece:
    """A block of a table, and the offset of its rows in the row-wise state."""

    row: int
    column: int
    num_rows: int
    num_columns: int
    state_offset: int


@dataclass(frozen=True)
class StoredState:
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTable:
    """A table in a checkpoint. `pieces` are the parts into which the plan split it."""

    name: str
    key: str
    rows: int
    dim: int
    dtype: torch.dtype
    pieces: list[Piece]
    states: dict[str, StoredState] = field(default_factory=dict)

    @property
    def column_blocks(self) -> list[tuple[int, int]]:
        """Return (first column, number of columns) of each block, ascending."""
        return sorted({(piece.column, piece.num_columns) for piece in self.pieces})

    def is_row_wise(self, state: str) -> bool:
        return len(self.states[state].shape) == 1


def layout(chunks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Piece]:
    """Return the pieces of a table that is split into (offsets, sizes). The order is that of their
    row-wise state: by columns, then by rows.
    """
    pieces, end = [], 0
    for (row, column), (num_rows, num_columns) in sorted(chunks, key=lambda chunk: chunk[0][::-1]):
        if num_rows and num_columns:
            pieces.append(Piece(row, column, num_rows, num_columns, end))
            end += num_rows
    return pieces


@dataclass(frozen=True)
class Inventory:
    """The content of a checkpoint, or of a model with its optimizer. Tables are listed by name;
    other tensors have their shape and dtype by key.
    """

    tables: dict[str, StoredTable]
    layers: dict[str, tuple[tuple[int, ...], torch.dtype]]


def inventory_of_step(tensors: StepTensors) -> Inventory:
    # Hosts' own tables are stored to resume training. They are not part of the model.
    keys = [key for key in tensors.entries if not is_replica_key(key)]
    shapes = {key: (tensors.shape(key), tensors.dtype(key)) for key in keys}
    return _inventory(shapes, lambda key: [(chunk.offsets, chunk.sizes) for chunk in tensors.chunks(key)])


def inventory_of_state(flat: Mapping[str, Any]) -> Inventory:
    """Return the inventory of a flat state (see flatten). A rank's optimizer knows only the state
    of its own tables."""
    shapes = {key: (tuple(value.size()), value.dtype) for key, value in flat.items()}
    return _inventory(shapes, lambda key: all_chunks(flat[key]))


def merge(parts: Iterable[Inventory]) -> Inventory:
    """Merge the inventories of all ranks."""
    tables: dict[str, StoredTable] = {}
    layers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for part in parts:
        layers.update(part.layers)
        for name, table in part.tables.items():
            known = tables.get(name, table)
            tables[name] = replace(table, states={**known.states, **table.states})
    return Inventory(tables, layers)


def _inventory(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    chunks_of: Callable[[str], list[tuple[tuple[int, ...], tuple[int, ...]]]],
) -> Inventory:
    tables: dict[str, StoredTable] = {}
    layers = dict(shapes)
    for key, (shape, dtype) in shapes.items():
        if key.startswith(MODEL) and (match := TABLE_WEIGHT.fullmatch(key)) and len(shape) == 2:
            tables[match["table"]] = StoredTable(match["table"], key, *shape, dtype, layout(chunks_of(key)))
            del layers[key]
    for key, (shape, dtype) in shapes.items():
        if key.startswith(STATE) and (match := TABLE_STATE.fullmatch(key)) and match["table"] in tables:
            tables[match["table"]].states[match["state"]] = StoredState(key, shape, dtype)
            del layers[key]
    return Inventory(tables, layers)


def all_chunks(value: torch.Tensor | ShardedTensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, sizes) of every shard on every rank."""
    if isinstance(value, ShardedTensor):
        return [(tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in value.metadata().shards_metadata]
    return [((0,) * value.dim(), tuple(value.shape))]


def local_chunks(value: torch.Tensor | ShardedTensor) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Return (tensor, offsets in the complete tensor) of every part that this rank holds."""
    if isinstance(value, ShardedTensor):
        return [(shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in value.local_shards()]
    return [(value, (0,) * value.dim())]


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts of tensors as one dict. The keys are the same as torch.distributed.checkpoint's."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def describe_dtype(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
