"""Say how a task is measured: what its training steps add up to, and what an evaluation of it computes."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from pipeline.models.tasks.retrieval import RetrievalTask
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.training.metrics import RunningMetrics, ScoreCollector
from pipeline.training.retrieval_metrics import RetrievalLossWindow, RetrievalMetrics


class Measure(Protocol):
    def update(self, prediction: Any) -> None:
        """Local: take one batch's predictions."""

    def compute(self) -> dict[str, float]:
        """Collective: the same numbers on every rank."""


class ClickMeasure:
    """NE, logloss, calibration, label rate, AUC, AUPRC and the number of samples."""

    def __init__(self, context: DistributedContext, batch_size: int) -> None:
        self._context = context
        self._running, self._scores = RunningMetrics(context, batch_size), ScoreCollector()

    def update(self, prediction: Any) -> None:
        self._running.update(prediction)
        self._scores.update(prediction)

    def compute(self) -> dict[str, float]:
        """Collective."""
        return {**self._running.compute(), **self._scores.compute(self._context)}


def evaluation_measure(model: nn.Module, context: DistributedContext, batch_size: int) -> Measure:
    """For the task inside `model`; `batch_size` is a rank's."""
    for module in model.modules():
        if isinstance(module, RetrievalTask):
            return RetrievalMetrics(context, module.recall_at)
    return ClickMeasure(context, batch_size)


def training_measure(task: nn.Module, context: DistributedContext, batch_size: int, window_samples: int) -> Measure:
    """Over about the last `window_samples` of all ranks."""
    if isinstance(task, RetrievalTask):
        return RetrievalLossWindow(context)
    return RunningMetrics(context, batch_size, window_samples)
