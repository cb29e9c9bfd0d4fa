"""Evaluate a model on a split, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from pipeline.config.registry import if_installed
from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from pipeline.models.tasks.group_metrics import GroupMeasure, NamedMetrics
from pipeline.models.tasks.labels import LabelsTask
from pipeline.models.tasks.task import Task, task_in
from pipeline.runtime.logs import get_logger, progress
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.distributed import DistributedContext, true_on_any_rank
from pipeline.training.readers import FailSafe, agreed_failure, too_many_bad

AGREE_EVERY_BATCHES = 8  # batches between two all-reduces of the flag "stop"
logger = get_logger(__name__)


class Collected(Protocol):
    """What a collector has found."""

    def write(self, evaluation: str) -> None:
        """Write it to a file next to `evaluation`, the JSON file of the metrics."""

    def lines(self) -> list[str]:
        """Return lines for the terminal."""


class Collector(Protocol):
    """Collects what an evaluation sees in addition to its metrics. The extra `runs` has three."""

    def update(self, clicks: dict[str, Any], batch: Batch, prediction: Any) -> None:
        """Add a batch, on all ranks. `clicks` is clicks_of(prediction). The batches come in the
        reader's order."""

    def compute(self, split: str, step: int, metrics: dict[str, float]) -> Collected | None:
        """Collective: return what was collected on rank 0, None on other ranks."""


def open_stats(reader: ShardReader, context: DistributedContext) -> Collector | None:
    """Return a collector for one evaluation, or None if no extra has one."""
    make: Callable[[ShardReader, DistributedContext], Collector] | None = if_installed("stats_collector")
    return make(reader, context) if make else None


def evaluate_model(
    model: nn.Module,
    reader: ShardReader,
    context: DistributedContext,
    max_batches: int | None = None,
    description: str = "evaluate",
    group_metrics_at: Sequence[int] = (),
    collectors: Sequence[Collector] = (),
    named_metrics: Sequence[str] = (),
) -> dict[str, float]:
    """Measure a model on the reader's split over all ranks. Collective.

    The result has NE, logloss, calibration, label rate, AUC, AUPRC and the number of samples. If the
    reader gives groups and the task has one logit a row, it also has GAUC and, for each k in
    `group_metrics_at`, NDCG and hit rate (models.tasks.group_metrics). A retrieval model gives recall@k
    and MRR against the catalogue of the split (models.tasks.retrieval_metrics). `named_metrics` are
    registered metrics, added for each binary label (models.metrics).

    `collectors` receive each batch. The model's training mode is restored.

    Raises:
        Preempted: on every rank, a few batches after any rank got SIGTERM. The measurements are dropped.
        TrainingError, OSError: on every rank, a few batches after any rank's reader failed; or too many
            rows are bad.
    """
    num_batches = min(reader.steps_per_epoch, max_batches or reader.steps_per_epoch)
    task = task_in(model)
    measures = _Measures(task, reader, context, group_metrics_at, named_metrics, collectors)
    # counts sound rows if a mask or weight excludes some of them
    num_present = torch.zeros(1, dtype=torch.int64)
    was_training = model.training
    model.eval()
    batches, fail_safe = reader.batches(epoch=0), FailSafe(reader)
    try:
        with preemption.deferred(), torch.no_grad(), progress(description, num_batches, context.is_main) as bar:
            with watchdog.stepping("evaluating"):
                for index, batch in enumerate(_waited_for(islice(fail_safe.batches(batches), num_batches))):
                    _, prediction = model(batch.to(context.device, non_blocking=True))
                    measures.update(prediction, batch)
                    if batch.present is not None:
                        num_present += torch.count_nonzero(batch.present).cpu()
                    bar.advance(1)
                    wants_to_stop = preemption.wanted() or fail_safe.error is not None
                    if index % AGREE_EVERY_BATCHES == 0 and true_on_any_rank(wants_to_stop, context):
                        raise agreed_failure(fail_safe.error, context) or preemption.Preempted()
            with watchdog.saving("computing metrics"):
                if failure := agreed_failure(fail_safe.error, context):
                    raise failure
                metrics = measures.compute()
    finally:
        batches.close()
        model.train(was_training)
    if num_batches == reader.steps_per_epoch:
        _note_bad_rows(reader, _num_sound(metrics, num_present, context), description)
    return metrics


def clicks_of(task: Task, prediction: Any) -> dict[str, Any]:
    """Return label prefix -> predictions of each binary label: logits, labels and sample_weights,
    [batch] each."""
    if isinstance(task, LabelsTask):
        return dict(task.clicks(prediction))
    return {"": prediction} if hasattr(prediction, "logits") else {}


def numbers_of(task: Task, prediction: Any) -> dict[str, Any]:
    """Return label prefix -> predictions of each label that is a number; their logits are values."""
    return dict(task.numbers(prediction)) if isinstance(task, LabelsTask) else {}


class _Measures:
    """The task's own metrics, the named and grouped metrics of each binary label, and collectors."""

    def __init__(
        self,
        task: Task,
        reader: ShardReader,
        context: DistributedContext,
        group_metrics_at: Sequence[int],
        named_metrics: Sequence[str],
        collectors: Sequence[Collector],
    ) -> None:
        self._task, self._collectors = task, collectors
        self._own = task.evaluation_measure(context, reader.batch_size)
        self._named = NamedMetrics(context, named_metrics, reader.num_rows)
        self._groups = _Groups(context, list(group_metrics_at)) if getattr(reader, "has_groups", False) else None

    def update(self, prediction: Any, batch: Batch) -> None:
        """Add a batch. Local."""
        self._own.update(prediction)
        clicks = clicks_of(self._task, prediction)
        self._named.update(clicks, batch, numbers_of(self._task, prediction))
        if self._groups:
            self._groups.update(clicks, batch.groups)
        for collector in self._collectors:
            collector.update(clicks, batch, prediction)

    def compute(self) -> dict[str, float]:
        """Return all metrics. Collective."""
        groups = self._groups.compute() if self._groups else {}
        return self._own.compute() | self._named.compute() | groups


class _Groups:
    """Metrics over groups of rows, for each binary label by its name."""

    def __init__(self, context: DistributedContext, at: list[int]) -> None:
        self._context, self._at = context, at
        self._measures: dict[str, GroupMeasure] = {}

    def update(self, clicks: dict[str, Any], groups: torch.Tensor | None) -> None:
        for prefix, of_label in clicks.items():
            self._measures.setdefault(prefix, GroupMeasure(self._context, self._at)).update(of_label, groups)

    def compute(self) -> dict[str, float]:
        """Return the metrics of groups. Collective."""
        return {
            prefix + name: value
            for prefix, measure in self._measures.items()
            for name, value in measure.compute().items()
        }


def _num_sound(metrics: dict[str, float], num_present: torch.Tensor, context: DistributedContext) -> int:
    """Count rows of all ranks that are neither padding nor quarantined. `num_present` is 0 if no
    batch has a mask. Collective."""
    total = num_present.to(context.device)
    if context.world_size > 1:
        dist.all_reduce(total)
    return int(total) or int(metrics["num_samples"])


def _note_bad_rows(reader: ShardReader, num_samples: int, description: str) -> None:
    """Log the quarantined rows of a complete split. Raises TrainingError if there are more than
    allowed."""
    bad = reader.num_rows - num_samples
    if problem := too_many_bad(reader, bad, reader.num_rows):
        raise problem
    if bad > 0:
        logger.warning("%s  %s of %s rows quarantined", description, f"{bad:,}", f"{reader.num_rows:,}")


def _waited_for(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the same batches and set the watchdog's phase: waiting for input, or evaluating."""
    while True:
        watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
        batch = next(batches, None)
        watchdog.beat(phase="evaluating")
        if batch is None:
            return
        yield batch
