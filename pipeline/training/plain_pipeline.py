"""Run training steps on one CPU rank. It copies no batch to a device, and there is no exchange to
overlap with compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pipeline.data.read.batch import Batch
from pipeline.sharding.torchrec.sharder import ShardedTables
from pipeline.training.step_optimizer import StepOptimizer


class PlainPipeline:
    """The computation of TorchRec's TrainPipelineBase in training; it also reads one batch ahead.

    It leaves out the copies to a device and six profiler ranges per step, which take about as long
    as the step of a small model.
    """

    def __init__(self, model: nn.Module, optimizer: StepOptimizer, device: torch.device) -> None:
        self._model, self._optimizer = model, optimizer
        self._next: Batch | None = None
        self._is_started = False
        self._tiered = [each for each in model.modules() if isinstance(each, ShardedTables) and each.tiered_groups]

    def progress(self, batches: Iterator[Batch]) -> object:
        """Train on the next batch and return its prediction.

        Raises StopIteration after the last batch.
        """
        if not self._is_started:
            self._next, self._is_started = next(batches, None), True
        batch = self._next
        if batch is None:
            raise StopIteration
        self._next = next(batches, None)
        if self._next is not None:
            for tables in self._tiered:
                tables.prefetch_rows(self._next.sparse_features)  # runs at the same time as this step
        self._optimizer.zero_grad()
        loss, prediction = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return prediction
