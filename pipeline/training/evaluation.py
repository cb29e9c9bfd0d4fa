"""Turn a model and a stream of batches into metrics over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn

from pipeline import preemption, watchdog
from pipeline.data.batch import Batch
from pipeline.data.reader import ShardReader
from pipeline.distributed import DistributedContext, true_on_any_rank
from pipeline.logs import progress
from pipeline.training.metrics import RunningMetrics, ScoreCollector

AGREE_EVERY_BATCHES = 8  # on whether to stop: one small all-reduce


def evaluate_model(
    model: nn.Module,
    reader: ShardReader,
    context: DistributedContext,
    max_batches: int | None = None,
    description: str = "evaluate",
) -> dict[str, float]:
    """Collective: NE, logloss, calibration, label rate, AUC, AUPRC and the number of samples of the reader's split.

    The model's training mode is restored.

    Raises:
        Preempted: on every rank, within a few batches of a SIGTERM to any of them; what was measured is dropped.
    """
    num_batches = min(reader.steps_per_epoch, max_batches or reader.steps_per_epoch)
    running, scores = RunningMetrics(context, reader.batch_size), ScoreCollector()
    was_training = model.training
    model.eval()
    batches = reader.batches(epoch=0)
    try:
        with preemption.deferred(), torch.no_grad(), progress(description, num_batches, context.is_main) as bar:
            with watchdog.stepping("evaluating"):
                for index, batch in enumerate(_waited_for(islice(batches, num_batches))):
                    _, prediction = model(batch.to(context.device, non_blocking=True))
                    running.update(prediction)
                    scores.update(prediction)
                    bar.advance(1)
                    if index % AGREE_EVERY_BATCHES == 0 and true_on_any_rank(preemption.wanted(), context):
                        raise preemption.Preempted
            with watchdog.saving("computing metrics"):
                return {**running.compute(), **scores.compute(context)}
    finally:
        batches.close()
        model.train(was_training)


def _waited_for(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; the watchdog knows on whom it is to wait."""
    while True:
        watchdog.beat(phase=watchdog.WAITING_FOR_INPUT)
        batch = next(batches, None)
        watchdog.beat(phase="evaluating")
        if batch is None:
            return
        yield batch
