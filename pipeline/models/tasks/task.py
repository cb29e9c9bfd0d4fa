"""What a task is: the loss that a model is trained with and the metrics that measure it, registered together by name.

    @register("task", "my_task")
    class MyTask(nn.Module): ...

A model's config names its task. A task of one's own may inherit from a task of this package, or be any module that does
what Task says.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from pipeline import devices
from pipeline.config.model import ModelConfig
from pipeline.config.registry import find
from pipeline.data.read.batch import Batch
from pipeline.data.targets import Target
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.distributed import DistributedContext


class Measure(Protocol):
    """Metrics that grow batch by batch. `prediction` is whatever the task's forward gives."""

    def update(self, prediction: Any) -> None:
        """Local: add one batch."""

    def compute(self) -> dict[str, float]:
        """Collective: the same numbers on every rank; of an evaluation with `num_samples` among them."""


class Task(Protocol):
    """What is registered as a "task": an nn.Module, made from the model's config and its tables.

    no_export: why its models cannot be exported; empty where they can, which takes outputs of one logit a row, or of the
    targets' widths. `exports = "towers"` says that its models give vectors of users and of items in the place of logits, by
    user_vectors and item_vectors (models/layers/two_tower.py), with a config that names `user_features` and `item_features`,
    and that items are retrieved by their dot product (serving/retrieval). One with `takes_targets = True` is made from the list of data.targets.Target besides, and learns labels
    of any kind and number; others learn one that is binary.
    """

    no_export: str

    def forward(self, outputs: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """The model's outputs for a batch -> (loss, prediction).

        The loss is a scalar, a mean over the batch's rows; rows of sample weight 0 count nothing. The prediction is a
        NamedTuple of detached tensors with the loss as `loss`, for the measures.
        """

    def losses(self, prediction: Any) -> torch.Tensor:
        """[batch]: each row's loss, for the error that names the rows whose loss is not finite."""

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        """Of the training steps, over about the last `window_samples` of all ranks; `batch_size` is a rank's."""

    def evaluation_measure(self, context: DistributedContext, batch_size: int) -> Measure:
        """Of an evaluation; the names of its metrics are the model config's `metrics`."""


class TaskModel(nn.Module):
    """A model and its task: forward(batch) -> (loss, prediction). `bf16` autocasts all but the loss."""

    def __init__(self, model: nn.Module, loss: nn.Module, precision: str = "fp32", train_offset: float = 0.0) -> None:
        """train_offset: added to the logits in training mode, where rows were sampled (data.targets)."""
        super().__init__()
        self.model, self.loss = model, loss
        self._bf16, self._train_offset = precision == "bf16", train_offset

    @property
    def task(self) -> Task:
        return self.loss  # type: ignore[return-value]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        # Two branches, not a flag to autocast: TorchRec traces this with torch.fx, where batch has no device yet.
        if self._bf16:
            with devices.current().autocast(torch.bfloat16):
                outputs = self.model(batch.dense_features, batch.sparse_features)
        else:
            outputs = self.model(batch.dense_features, batch.sparse_features)
        if self._train_offset and self.training:
            outputs = outputs + self._train_offset
        return self.loss(outputs, batch)  # type: ignore[no-any-return]

    def losses(self, prediction: Any) -> torch.Tensor:
        """[batch]"""
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
) -> TaskModel:
    """`model`, which is build_model's for the same config and tables, with the task that the config names.

    targets: what it learns; None: one binary label. A model of one logit learns one label of any kind but ordinal.

    Raises:
        ConfigError: the task learns one binary label, and the targets are others.
    """
    targets = targets or [Target("label")]
    if not config.learns_all and targets[0].width > 1:
        raise ConfigError(
            f"model={config.kind} gives one number a row, and ordinal label {targets[0].name!r} of {targets[0].num_buckets} "
            f"buckets wants {targets[0].width}: take a model with a tower for each label, such as model=shared_bottom"
        )
    plain = len(targets) == 1 and targets[0].kind == "binary"
    name = "labels" if config.task == "click" and not plain else config.task
    task = find("task", name, f"task of model={config.kind}")
    if getattr(task, "takes_targets", False):
        return TaskModel(model, task(config, tables, targets), precision)
    if not plain:
        said = ", ".join(f"{target.name} ({target.kind})" for target in targets)
        raise ConfigError(f"model={config.kind} learns one binary label, not {said}: choose one by data.columns.label")
    return TaskModel(model, task(config, tables), precision, targets[0].train_offset)


def task_in(model: nn.Module) -> Task:
    """Of a model that may be sharded."""
    return next(module for module in model.modules() if isinstance(module, TaskModel)).task
