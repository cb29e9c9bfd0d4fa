"""Open the step of a run for an export. Its layers are loaded; its tables stay in their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline.checkpoint.chains import open_step
from pipeline.checkpoint.steps import read_step_file, step_path
from pipeline.checkpoint.tables import MODEL, StoredTable, inventory_of_step
from pipeline.checkpoint.tensors import BLOCK_BYTES, StepTensors
from pipeline.checkpoint.vocabularies import trained_dataset
from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import find
from pipeline.data.dataset import Dataset
from pipeline.data.read.endless import FILE, Values, from_bytes
from pipeline.data.targets import Target
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.table import MANAGED_STATE, Table
from pipeline.models.build import build_model
from pipeline.runtime.errors import CheckpointError, ServingError, did_you_mean
from pipeline.serving.artifact.composed import ComposedTables, RowMap, composed_in, row_map
from pipeline.serving.artifact.dense_export import Layers, take_collection
from pipeline.serving.artifact.quantize import WORD_BITS, KeptRows
from pipeline.serving.artifact.task_quality import ServedTask, width_of
from pipeline.serving.scoring.lookup import ServedFeature
from pipeline.training.preflight import resolve_alone
from pipeline.training.run_state import as_signed, chosen_step, config_of, folder_of

if TYPE_CHECKING:
    from pipeline.planner.resolved_job import ResolvedJob

INNER = f"{MODEL}model."  # keys of the model inside the task


def block_rows(row_bytes: int) -> int:
    """Return the number of rows in one block: about BLOCK_BYTES, and complete words of KeptRows."""
    return max(1, BLOCK_BYTES // max(1, row_bytes) // WORD_BITS) * WORD_BITS


@dataclass(frozen=True)
class TrainedStep:
    """A step of a run and the data set that the run was trained on.

    model: takes pooled rows [batch, sum of model_dims] instead of ids.
    tables, stored: the exported tables, and where the checkpoint stores them. If tables are
        compressed, these are the parts, and `composed` computes the model's input from them.
    features: look up `tables`. keys: the features that the model reads, in the order of the batch.
    new_values: vocabulary -> values that a stream added to it.
    best_by: the metric if the step was chosen because it is the best of the run, else empty.
    """

    job: TrainJob
    step: int
    manifest: dict[str, Any]
    dataset: Dataset
    data_path: str
    new_values: Values
    best_by: str
    model: nn.Module
    model_dims: list[int]
    keys: list[str]
    targets: list[Target]
    tensors: StepTensors
    tables: list[Table]
    stored: list[StoredTable]
    features: list[ServedFeature]
    composed: ComposedTables | None

    @property
    def num_dense(self) -> int:
        return len(self.dataset.dense_features)

    @property
    def precision(self) -> str:
        """Return fp32 or bf16, the precision in which the trainer computes the layers."""
        return "bf16" if self.job.trainer.precision == "bf16" else "fp32"

    @property
    def has_towers(self) -> bool:
        """Return True if the model outputs vectors of users and of items instead of logits."""
        return getattr(find("task", self.job.model.task), "exports", "logits") == "towers"

    @property
    def tasks(self) -> list[ServedTask]:
        """Return the tasks of the artifact; empty if the model learns one binary label."""
        if len(self.targets) == 1 and self.targets[0].kind == "binary":
            return []
        return [ServedTask(target.name, target.kind, target.width) for target in self.targets]

    @property
    def num_rows(self) -> int:
        return sum(stored.rows for stored in self.stored)

    @property
    def table_bytes(self) -> int:
        return sum(table.rows * table.dim * table.dtype.itemsize for table in self.stored)

    @property
    def layer_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.state_dict().values())

    def rows(self, table: StoredTable, kept: KeptRows | None = None) -> Iterator[torch.Tensor]:
        """Yield the rows that are kept, ascending, [n, dim] float32. A block without such rows is not read.

        Raises ServingError for NaN or an infinity, and DamagedError.
        """
        rows_at_once = block_rows(table.dim * table.dtype.itemsize)
        for first in range(0, table.rows, rows_at_once):
            count = min(rows_at_once, table.rows - first)
            mask = None if kept is None else kept.mask(first, count)
            if mask is not None and not mask.any():
                continue
            rows = self.tensors.read(table.key, [first, 0], [count, table.dim]).float()
            rows = rows if mask is None else rows[torch.from_numpy(mask)]
            if not bool(rows.isfinite().all()):
                raise ServingError(
                    f"table {table.name!r} holds NaN or an infinity in rows {first} to {first + count - 1}: "
                    "export an earlier step (step=<number>)"
                )
            yield rows

    def program(self, layers: nn.Module | None = None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return `layers`, or the model, as the trainer evaluates it: (dense, pooled) -> outputs."""
        module = Layers(self.model, width=width_of(self.tasks)).eval() if layers is None else layers

        def run(dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
            is_bf16 = self.precision == "bf16"
            context: AbstractContextManager[object] = (
                torch.autocast("cpu", dtype=torch.bfloat16) if is_bf16 else nullcontext()
            )
            with context:
                outputs: torch.Tensor = module(dense, pooled)
            return outputs

        return run


def open_trained_step(job: ExportJob) -> TrainedStep:
    """Open the step that the job chooses.

    Raises ServingError: the run, the data set or a table that job.tables names is missing. Raises
    CheckpointError: the step's tables or layers differ from the run's config.
    """
    trained = config_of(job.run)
    if trained is None:
        raise ServingError(f"{job.run} is not a run folder: it has no config.yaml; set run=<the run_dir of a training>")
    chosen = chosen_step(job.run, trained, job.step, job.which)
    trained = as_signed(job.run, trained, chosen)
    task = find("task", trained.model.task)
    if task.no_export:
        raise ServingError(f"model={trained.model.kind} cannot be exported: {task.no_export}")
    step, manifest, tensors = open_step(folder_of(job.run), chosen)
    dataset, where = trained_dataset(manifest, job.data_path or trained.data.path)
    if dataset is None:
        raise ServingError(
            f"{where}: the artifact needs its vocabularies and validation rows; set data_path=<its folder>"
        )
    resolved = resolve_alone(trained, dataset)
    _check_table_names(job, resolved)
    content = read_step_file(step_path(folder_of(job.run), step), FILE)
    return TrainedStep(
        job=trained,
        step=step,
        manifest=manifest,
        dataset=dataset,
        data_path=where,
        new_values={} if content is None else from_bytes(content).values,
        best_by=trained.best_metric if job.step is None and chosen is not None else "",
        targets=resolved.targets,
        tensors=tensors,
        **_load(trained, resolved, dataset, tensors),
    )


def load_model(job: ExportJob) -> nn.Module:
    """Return the trained model with its tables, unsharded. Raises as open_trained_step does."""
    step = open_trained_step(job)
    resolved = resolve_alone(step.job, step.dataset)
    model = build_model(
        step.job.model, resolved.tables, step.num_dense, seed=step.job.trainer.seed, targets=resolved.targets
    )
    state = {}
    for name, value in model.state_dict().items():
        state[name] = _read_tensor(step.tensors, name, value.shape)
    model.load_state_dict(state, assign=True)  # tables are on meta
    return model.eval()


def _check_table_names(job: ExportJob, resolved: ResolvedJob) -> None:
    known = {name for part in resolved.plain_tables for name in (part.name, part.config_name)}
    if unknown := [name for name in job.tables if name not in known]:
        near = did_you_mean(unknown[0], sorted(known))
        raise ServingError(f"tables.{unknown[0]}: the run has no such table among {len(resolved.tables)}{near}")


def _load(job: TrainJob, resolved: ResolvedJob, dataset: Dataset, tensors: StepTensors) -> dict[str, Any]:
    """Build the model, load its layers and find its tables. Return these fields of TrainedStep."""
    tables = resolved.tables
    model = build_model(job.model, tables, len(dataset.dense_features), seed=job.trainer.seed, targets=resolved.targets)
    read = {feature for table in tables for feature in table.feature_names}
    keys = looked_up = [key for key in dataset.sparse_feature_names if key in read]
    composed = _load_composed(model, tables, keys, tensors)
    model_dims = take_collection(model, keys)
    if composed is not None:
        tables, looked_up = composed.parts, composed.looked_up
    stored = _stored(tables, tensors)
    _load_layers(model, tensors)
    owner = {feature: number for number, table in enumerate(tables) for feature in table.feature_names}
    return {
        "model": model.eval(),
        "model_dims": model_dims,
        "keys": keys,
        "tables": tables,
        "stored": stored,
        "features": [ServedFeature(key, owner[key]) for key in looked_up],
        "composed": composed,
    }


def _stored(tables: list[Table], tensors: StepTensors) -> list[StoredTable]:
    known = inventory_of_step(tensors).tables
    if missing := [table.name for table in tables if table.name not in known]:
        raise CheckpointError(f"{tensors.path} has no table {missing[0]!r}, which the run's config names")
    for table in tables:
        found = known[table.name]
        if (found.rows, found.dim) != (table.num_embeddings, table.embedding_dim):
            raise CheckpointError(
                f"{tensors.path}: table {table.name!r} is {found.rows} x {found.dim}, the run's config "
                f"and data say {table.num_embeddings} x {table.embedding_dim}"
            )
    return [known[table.name] for table in tables]


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
    """Return the map from ids to rows of a table with managed collision, as saved in the step."""
    found = []
    for name in ("sorted_ids", "rows"):
        ending = f".{MANAGED_STATE}.{table}.{name}"
        key = next((key for key in tensors.entries if key.startswith(MODEL) and key.endswith(ending)), None)
        if key is None:
            raise CheckpointError(f"{tensors.path} has no map of ids for table {table!r}, which the run's config names")
        found.append(tensors.read(key, [0], tensors.shape(key)).numpy())
    return row_map(found[0], found[1], num_buckets)


def _load_layers(model: nn.Module, tensors: StepTensors, path: str = "") -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(_read_tensor(tensors, path + name, value.shape))


def _read_tensor(tensors: StepTensors, name: str, shape: torch.Size) -> torch.Tensor:
    key = INNER + name
    if key not in tensors.entries or tensors.shape(key) != tuple(shape):
        found = list(tensors.shape(key)) if key in tensors.entries else "none"
        raise CheckpointError(f"{tensors.path}: {name} is {found}, the run's config says {list(shape)}")
    return tensors.read(key, [0] * len(shape), shape)
