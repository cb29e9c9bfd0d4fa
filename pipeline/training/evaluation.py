"""Turn a model and a stream of batches into metrics over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn

from pipeline.data.batch import Batch
from pipeline.data.reader import ShardReader
from pipeline.distributed import DistributedContext
from pipeline.logs import progress
from pipeline.training.metrics import RunningMetrics, ScoreCollector


def evaluate_model(
    model: nn.Module,
    reader: ShardReader,
    context: DistributedContext,
    max_batches: int | None = None,
    description: str = "evaluate",
) -> dict[str, float]:
    """Collective: NE, logloss, calibration, label rate, AUC, AUPRC and the number of samples of the reader's split.

    The model's training mode is restored.
    """
    num_batches = min(reader.steps_per_epoch, max_batches or reader.steps_per_epoch)
    running, scores = RunningMetrics(context, reader.batch_size), ScoreCollector()
    was_training = model.training
    model.eval()
    batches: Iterator[Batch] = reader.batches(epoch=0)
    with torch.no_grad(), progress(description, num_batches, visible=context.is_main) as bar:
        for batch in islice(batches, num_batches):
            _, prediction = model(batch.to(context.device, non_blocking=True))
            running.update(prediction)
            scores.update(prediction)
            bar.advance(1)
    model.train(was_training)
    return {**running.compute(), **scores.compute(context)}
