"""Load a checkpoint's step for export: layers in memory, tables left in their files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from pipeline.checkpoint.tables import MODEL, StoredTable, inventory_of_step
from pipeline.checkpoint.tensors import StepTensors
from pipeline.data.targets import Target
from pipeline.embeddings.compression.managed_collision import STATE
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import CheckpointError
from pipeline.serving.artifact.composed import ComposedTables, composed_in
from pipeline.serving.artifact.dense_export import Layers, take_collection
from pipeline.serving.artifact.row_maps import RowMap, row_map
from pipeline.serving.artifact.served_tasks import ServedTask, width_of
from pipeline.serving.scoring.lookup import ServedFeature

INNER = f"{MODEL}model."  # keys of the model inside the task


@dataclass(frozen=True)
class TrainedModel:
    """`model` has given up its collection: it takes pooled rows, by `features` and of `dims`. `stored[i]` is tables[i].

    Where tables are compressed, `tables`, `features` and `dims` are their parts', and `composed` makes of the parts' pooled
    rows those that the model takes, of `model_dims`.
    """

    model: nn.Module
    tables: list[Table]
    stored: list[StoredTable]
    tensors: StepTensors
    features: list[ServedFeature]
    dims: list[int]
    num_dense: int
    is_bf16: bool
    model_dims: list[int]
    keys: list[str]  # the data set's features that the model reads, in the batch's order
    composed: ComposedTables | None = None
    targets: list[Target] = field(default_factory=lambda: [Target("label")])

    @property
    def tasks(self) -> list[ServedTask]:
        """Of its artifact: none where it learns one binary label."""
        if len(self.targets) == 1 and self.targets[0].kind == "binary":
            return []
        return [ServedTask(target.name, target.kind, target.width) for target in self.targets]

    @property
    def table_bytes(self) -> int:
        """Of the rows, as they were trained."""
        return sum(table.rows * table.dim * table.dtype.itemsize for table in self.stored)

    @property
    def layer_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.state_dict().values())

    def program(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The layers as the trainer evaluates them: (dense, pooled) -> logits [batch], or [batch, sum of widths]."""
        layers = Layers(self.model, width=width_of(self.tasks)).eval()

        def run(dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
            context: AbstractContextManager[object] = (
                torch.autocast("cpu", dtype=torch.bfloat16) if self.is_bf16 else nullcontext()
            )
            with context:
                logits: torch.Tensor = layers(dense, pooled)
            return logits

        return run


def load_trained(
    model: nn.Module, tables: list[Table], keys: list[str], tensors: StepTensors, num_dense: int, is_bf16: bool
) -> TrainedModel:
    """`model` was built for `tables`, on meta; `keys` are the data set's features, in the batch's order.

    Raises:
        CheckpointError: the step holds other tables or layers than the run's config says.
    """
    read = {feature for table in tables for feature in table.feature_names}
    own = keys = [key for key in keys if key in read]
    inventory = inventory_of_step(tensors)
    composed = _load_composed(model, tables, keys, tensors)
    model_dims = dims_of = take_collection(model, keys)
    if composed is not None:
        tables, keys, dims_of = composed.parts, composed.looked_up, composed.dims
    if missing := [table.name for table in tables if table.name not in inventory.tables]:
        raise CheckpointError(f"{tensors.path} has no table {missing[0]!r}, which the run's config names")
    stored = [inventory.tables[table.name] for table in tables]
    for table, found in zip(tables, stored, strict=True):
        if (found.rows, found.dim) != (table.num_embeddings, table.embedding_dim):
            raise CheckpointError(
                f"{tensors.path}: table {table.name!r} is {found.rows} x {found.dim}, the run's config and data say "
                f"{table.num_embeddings} x {table.embedding_dim}"
            )
    _load_layers(model, tensors)
    owner = {feature: number for number, table in enumerate(tables) for feature in table.feature_names}
    features = [ServedFeature(key, owner[key]) for key in keys]
    return TrainedModel(
        model.eval(), tables, stored, tensors, features, dims_of, num_dense, is_bf16, model_dims, own, composed
    )


def _load_composed(
    model: nn.Module, tables: list[Table], keys: list[str], tensors: StepTensors
) -> ComposedTables | None:
    if (found := composed_in(model)) is None:
        return None
    path, module = found
    _load_layers(module.composition, tensors, f"{path}.composition.")
    managed = {part.name: part.managed for part in physical_tables(tables) if part.managed is not None}
    maps = {name: _row_map(tensors, name, rows.num_buckets) for name, rows in managed.items()}
    return ComposedTables(tables, keys, module.composition, maps)


def _row_map(tensors: StepTensors, table: str, num_buckets: int) -> RowMap:
    """Of a table with managed collision: which id had which row when the step was saved."""
    found = []
    for name in ("sorted_ids", "rows"):
        ending = f".{STATE}.{table}.{name}"
        key = next((key for key in tensors.entries if key.startswith(MODEL) and key.endswith(ending)), None)
        if key is None:
            raise CheckpointError(f"{tensors.path} has no map of ids for table {table!r}, which the run's config names")
        found.append(tensors.read(key, [0], tensors.shape(key)).numpy())
    return row_map(found[0], found[1], num_buckets)


def _load_layers(model: nn.Module, tensors: StepTensors, path: str = "") -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            key = INNER + path + name
            if key not in tensors.entries or tensors.shape(key) != tuple(value.shape):
                found = list(tensors.shape(key)) if key in tensors.entries else "none"
                raise CheckpointError(f"{tensors.path}: {name} is {found}, the run's config says {list(value.shape)}")
            value.copy_(tensors.read(key, [0] * value.dim(), value.shape))
