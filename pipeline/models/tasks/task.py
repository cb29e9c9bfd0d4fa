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

from pipeline.config.model import ModelConfig
from pipeline.config.registry import find
from pipeline.data.read.batch import Batch
from pipeline.embeddings.table import Table
from pipeline.runtime.process.distributed import DistributedContext


class Measure(Protocol):
    """Metrics that grow batch by batch. `prediction` is whatever the task's forward gives."""

    def update(self, prediction: Any) -> None:
        """Local: add one batch."""

    def compute(self) -> dict[str, float]:
        """Collective: the same numbers on every rank; of an evaluation with `num_samples` among them."""


class Task(Protocol):
    """What is registered as a "task": an nn.Module, made from the model's config and its tables.

    no_export: why its models cannot be exported; empty where they can, which takes outputs of one logit a row.
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

    def __init__(self, model: nn.Module, loss: nn.Module, precision: str = "fp32") -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self._bf16 = precision == "bf16"

    @property
    def task(self) -> Task:
        return self.loss  # type: ignore[return-value]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        # Two branches, not a flag to autocast: TorchRec traces this with torch.fx, where batch has no device yet.
        if self._bf16:
            device_type = "cuda" if next(self.model.parameters()).is_cuda else "cpu"
            with torch.autocast(device_type, dtype=torch.bfloat16):
                outputs = self.model(batch.dense_features, batch.sparse_features)
        else:
            outputs = self.model(batch.dense_features, batch.sparse_features)
        return self.loss(outputs, batch)  # type: ignore[no-any-return]

    def losses(self, prediction: Any) -> torch.Tensor:
        """[batch]"""
        return self.task.losses(prediction)

    def training_measure(self, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
        return self.task.training_measure(context, batch_size, window_samples)


def make_task(config: ModelConfig, model: nn.Module, tables: list[Table], *, precision: str = "fp32") -> TaskModel:
    """`model`, which is build_model's for the same config and tables, with the task that the config names."""
    task = find("task", config.task, f"task of model={config.kind}")
    return TaskModel(model, task(config, tables), precision)


def task_in(model: nn.Module) -> Task:
    """Of a model that may be sharded."""
    return next(module for module in model.modules() if isinstance(module, TaskModel)).task
