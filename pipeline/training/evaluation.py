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
from pipeline.models.tasks.group_metrics import GroupMeasure
from pipeline.models.tasks.labels import LabelsTask
from pipeline.models.tasks.named_metrics import NamedMetrics
from pipeline.models.tasks.task import Task, task_in
from pipeline.runtime.logs import get_logger, progress
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.distributed import DistributedContext, true_on_any_rank
from pipeline.training.input_watch import FailSafe, agreed_failure, too_many_bad

AGREE_EVERY_BATCHES = 8  # on whether to stop: one small all-reduce
logger = get_logger(__name__)


class StatsCollector(Protocol):
    """Collects what an evaluation sees in addition to its metrics. The extra `runs` has one."""

    def update(self, prediction: Any, batch: Batch) -> None:
        """Local. The batches come in the reader's order."""

    def compute(self, split: str, step: int, metrics: dict[str, float]) -> object | None:
        """Collective: return what was collected on rank 0, None on other ranks."""


def open_stats(reader: ShardReader, context: DistributedContext) -> StatsCollector | None:
    """Return a collector for one evaluation, or None if no extra has one."""
    make: Callable[[ShardReader, DistributedContext], StatsCollector] | None = if_installed("stats_collector")
    return make(reader, context) if make else None


def evaluate_model(
    model: nn.Module,
    reader: ShardReader,
    context: DistributedContext,
    max_batches: int | None = None,
    description: str = "evaluate",
    group_metrics_at: Sequence[int] = (),
    stats: StatsCollector | None = None,
    named_metrics: Sequence[str] = (),
) -> dict[str, float]:
    """Collective: NE, logloss, calibration, label rate, AUC, AUPRC and the number of samples of the reader's split.

    Where the reader gives groups and the task one logit a row, also GAUC and, at each k of `group_metrics_at`, NDCG and
    hit rate (models.tasks.group_metrics).

    named_metrics: registered metrics that are added for each binary label (models.metrics).

    Of a retrieval model: recall@k and MRR against the split's catalogue (models.tasks.retrieval_metrics).

    The model's training mode is restored. `stats` is given each batch of a binary label, the main one of several.

    Raises:
        Preempted: on every rank, within a few batches of a SIGTERM to any of them; what was measured is dropped.
        TrainingError, OSError: on every rank, within a few batches of any rank's reader failing; or too many rows are bad.
    """
    num_batches = min(reader.steps_per_epoch, max_batches or reader.steps_per_epoch)
    task = task_in(model)
    measures = _Measures(task, reader, context, group_metrics_at, named_metrics, stats)
    num_present = torch.zeros(1, dtype=torch.int64)  # where a mask or weight leaves rows out that are sound
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
    """What has logits, labels and sample_weights [batch] of binary labels, by what their metrics' names begin with."""
    if isinstance(task, LabelsTask):
        return dict(task.clicks(prediction))
    return {"": prediction} if hasattr(prediction, "logits") else {}


def main_prefix(task: Task) -> str:
    """Of the main label's metrics."""
    return task.prefixes[0] if isinstance(task, LabelsTask) else ""


class _Measures:
    """The task's own measure, and what is added to it for each binary label: named metrics, those of groups, stats."""

    def __init__(
        self,
        task: Task,
        reader: ShardReader,
        context: DistributedContext,
        group_metrics_at: Sequence[int],
        named_metrics: Sequence[str],
        stats: StatsCollector | None,
    ) -> None:
        self._task, self._stats = task, stats
        self._own = task.evaluation_measure(context, reader.batch_size)
        self._named = NamedMetrics(context, named_metrics)
        self._groups = _Groups(context, list(group_metrics_at)) if getattr(reader, "has_groups", False) else None

    def update(self, prediction: Any, batch: Batch) -> None:
        """Local."""
        self._own.update(prediction)
        clicks = clicks_of(self._task, prediction)
        self._named.update(clicks)
        if self._groups:
            self._groups.update(clicks, batch.groups)
        if self._stats and (main := clicks.get(main_prefix(self._task))) is not None:
            self._stats.update(main, batch)

    def compute(self) -> dict[str, float]:
        """Collective."""
        groups = self._groups.compute() if self._groups else {}
        return self._own.compute() | self._named.compute() | groups


class _Groups:
    """Measures of groups of rows, for each binary label by its name."""

    def __init__(self, context: DistributedContext, at: list[int]) -> None:
        self._context, self._at = context, at
        self._measures: dict[str, GroupMeasure] = {}

    def update(self, clicks: dict[str, Any], groups: torch.Tensor | None) -> None:
        for prefix, of_label in clicks.items():
            self._measures.setdefault(prefix, GroupMeasure(self._context, self._at)).update(of_label, groups)

    def compute(self) -> dict[str, float]:
        """Collective."""
        return {
            prefix + name: value
            for prefix, measure in self._measures.items()
            for name, value in measure.compute().items()
        }


def _num_sound(metrics: dict[str, float], num_present: torch.Tensor, context: DistributedContext) -> int:
    """Collective. Rows of all ranks that are neither padding nor quarantined; `num_present` is 0 where they all count."""
    total = num_present.to(context.device)
    if context.world_size > 1:
        dist.all_reduce(total)
    return int(total) or int(metrics["num_samples"])


def _note_bad_rows(reader: ShardReader, num_samples: int, description: str) -> None:
    """Those of a whole split that were quarantined. Raises TrainingError where they are more than is allowed."""
    bad = reader.num_rows - num_samples
    if problem := too_many_bad(reader, bad, reader.num_rows):
        raise problem
    if bad > 0:
        logger.warning("%s  %s of %s rows quarantined", description, f"{bad:,}", f"{reader.num_rows:,}")


def _waited_for(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; the watchdog is given the phase: waiting for input, or evaluating."""
    while True:
        watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
        batch = next(batches, None)
        watchdog.beat(phase="evaluating")
        if batch is None:
            return
        yield batch
