"""Define the interface of a task: the loss that a model is trained with and its metrics, registered
by name.

    @register("task", "my_task")
    class MyTask(nn.Module): ...

A model's config names its task. A new task may inherit from a task of this package, or be any
module with the methods of Task.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from pipeline import devices
from pipeline.config.model import ModelConfig
from pipeline.config.registry import find
from pipeline.config.training import LossConfig
from pipeline.data.read.batch import Batch
from pipeline.data.targets import Target, heads_of
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext


class Measure(Protocol):
    """Measure metrics batch by batch. `prediction` is what the task's forward returns as its second value."""

    def update(self, prediction: Any) -> None:
        """Local: add one batch."""

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on all ranks. The metrics of an evaluation include `num_samples`."""


class Task(Protocol):
    """The interface of a registered "task": an nn.Module of the model's config and tables.

    no_export: why models of this task cannot be exported. It is empty if they can; then outputs are
    one logit per row, or [B, sum of the targets' widths]. exports="towers": the model has
    user_vectors and item_vectors (extras/models/layers/two_tower.py), and its config has
    `user_features` and `item_features`; items are retrieved by dot product (extras/retrieval).
    takes_targets=True: the task takes the list of data.targets.Target. Other tasks learn one binary
    label. A static method extra_rows(resolved, rank) may add rows to training batches
    (training.readers.extra_rows_of).
    """

    no_export: str

    def forward(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Return (loss, prediction) for the model's outputs of a batch.

        The loss is a scalar mean over the rows; rows of sample weight 0 count nothing. The
        prediction is a NamedTuple of detached tensors with the loss as `loss`.
        """

    def losses(self, prediction: Any) -> torch.Tensor:
        """Return the loss of each row [batch], so that rows whose loss is not finite can be named."""

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        """Return the measure of about the last `window_samples` samples of all ranks."""

    def evaluation_measure(self, context: DistributedContext, batch_size: int) -> Measure:
        """Return the measure of an evaluation, which includes the config's `metrics`."""


class TaskModel(nn.Module):
    """Join a model and its task: forward(batch) -> (loss, prediction). With bf16, the loss is not in autocast."""

    def __init__(self, model: nn.Module, loss: nn.Module, precision: str = "fp32", train_offset: float = 0.0) -> None:
        """train_offset: this is added to logits in training if rows were sampled (data.targets)."""
        super().__init__()
        self.model, self.loss = model, loss
        self._bf16, self._train_offset = precision == "bf16", train_offset

    @property
    def task(self) -> Task:
        return self.loss  # type: ignore[return-value]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        # No flag for autocast, because TorchRec traces this with torch.fx, without a device.
        if self._bf16:
            with devices.current().autocast(torch.bfloat16):
                outputs = self.model(batch.dense_features, batch.sparse_features)
        else:
            outputs = self.model(batch.dense_features, batch.sparse_features)
        if self._train_offset and self.training:
            outputs = outputs + self._train_offset
        return self.loss(outputs, batch)

    def losses(self, prediction: Any) -> torch.Tensor:
        """Return the loss of each row [batch]."""
        return self.task.losses(prediction)

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        return self.task.training_measure(context, batch_size, window_samples)


def make_task(
    config: ModelConfig,
    model: nn.Module,
    tables: list[Table],
    targets: list[Target] | None = None,
    *,
    precision: str = "fp32",
    loss: LossConfig | None = None,
    rows_per_stream: int = 1,
) -> TaskModel:
    """Join `model` and the task that its config names.

    targets: the labels to learn; None: one binary label. loss: None is the task's own. Raises
    ConfigError if the model cannot learn the labels, or has no loss that `loss` could change.
    rows_per_stream: rows of a training batch that may belong to one group (data.read.streams).
    """
    targets = targets or [Target("label")]
    main = heads_of(targets)[0]
    if not config.learns_all and main.width > 1:
        raise ConfigError(
            f"model={config.kind} gives one number per row, and label {main.name!r} of kind {main.kind} "
            f"with num_buckets={main.num_buckets} needs {main.width}; choose a model with a "
            "tower for each label, such as model=shared_bottom"
        )
    plain = len(targets) == 1 and targets[0].kind == "binary"
    name = "labels" if config.task == "click" and not plain else config.task
    if loss is not None and loss.changes:
        if name != "click":
            raise ConfigError(
                f"{loss.changes}: these keys change the loss of one binary label, and model={config.kind} trains "
                f"by the loss of task {name!r}; remove them, or choose another model"
            )
        task = find("task", "reshaped_click", "trainer.loss")
        return TaskModel(model, task(config, tables, loss, rows_per_stream), precision, targets[0].train_offset)
    task = find("task", name, f"task of model={config.kind}")
    if getattr(task, "takes_targets", False):
        return TaskModel(model, task(config, tables, targets), precision)
    if not plain:
        said = ", ".join(f"{target.name} ({target.kind})" for target in targets)
        raise ConfigError(f"model={config.kind} learns one binary label, not {said}: choose one by data.columns.label")
    return TaskModel(model, task(config, tables), precision, targets[0].train_offset)


def task_in(model: nn.Module) -> Task:
    """Return the task of a model, which may be sharded."""
    return next(module for module in model.modules() if isinstance(module, TaskModel)).task
