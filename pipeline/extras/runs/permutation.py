"""Measure how much a model relies on each feature: the increase of NE if its values are shuffled
(Breiman 2001).

If other features carry the same information, a feature looks less important than it is alone,
because the model uses the other features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import JaggedTensor

from pipeline.data.quality import binary_entropy
from pipeline.data.read.batch import Batch, with_features
from pipeline.data.read.reader import ShardReader
from pipeline.models.tasks.task import task_in
from pipeline.runtime.errors import TrainingError
from pipeline.runtime.logs import progress
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.distributed import DistributedContext, true_on_any_rank
from pipeline.training.evaluation import clicks_of
from pipeline.training.readers import FailSafe, agreed_failure

SEED = 0


def permutation_importance(
    model: nn.Module, reader: ShardReader, context: DistributedContext, dense_names: list[str], num_rows: int
) -> dict[str, Any]:
    """Collective: measure on the split's first batches, `num_rows` rows over all ranks. A feature's
    values are shuffled within each rank's batch, with one forward pass per feature and batch.
    Return rows, ne, and for each feature the increase of NE with its standard error over rows. With
    several labels these are of the first binary label, `label` is its name, and `others` has them
    for each further binary label whose NE is defined.

    Raises:
        TrainingError: the model has no logits, as for retrieval; or there are fewer than two rows; or labels are equal.
    """
    num_batches = min(reader.steps_per_epoch, -(-num_rows // reader.batch_size // context.world_size) or 1)
    task, was_training = task_in(model), model.training
    names: list[str] = []
    sums: dict[str, torch.Tensor] = {}  # by the prefix of the label's metrics
    model.eval()
    fail_safe = FailSafe(reader)
    batches = reader.batches(epoch=0)
    try:
        with preemption.deferred(), torch.no_grad(), watchdog.stepping("evaluating"):
            with progress("importance", num_batches, context.is_main) as bar:
                for index, batch in zip(range(num_batches), fail_safe.batches(batches), strict=False):
                    batch = batch.to(context.device)
                    names = [*dense_names, *batch.sparse_features.keys()]
                    of_batch = _of_batch(model, task, batch, dense_names, [SEED, index, context.rank])
                    sums = {prefix: sums.get(prefix, 0.0) + part for prefix, part in of_batch.items()}
                    bar.advance(1)
                    if true_on_any_rank(preemption.wanted() or fail_safe.error is not None, context):
                        raise agreed_failure(fail_safe.error, context) or preemption.Preempted()
            if failure := agreed_failure(fail_safe.error, context):
                raise failure
    finally:
        batches.close()
        model.train(was_training)
    found = {}
    for prefix, part in sums.items():
        total = part.to(context.device)
        if context.world_size > 1:
            dist.all_reduce(total)
        found[prefix.removesuffix("/")] = _summarized(names, total.cpu().numpy())
    (label, (first, problem)), *others = found.items()
    if first is None:
        raise TrainingError(problem)
    if not label:
        return first
    return {**first, "label": label, "others": {name: values for name, (values, _) in others if values}}


def _of_batch(
    model: nn.Module, task: Any, batch: Batch, dense_names: list[str], seed: list[int]
) -> dict[str, torch.Tensor]:
    """Return [1 + features, 4] for each binary label. The first row has sums over rows: rows,
    weighted rows, positives and losses. The row of a feature has weighted added losses, and the
    products of squared weights with 1, added losses and their squares.
    """
    before = _losses(model, task, batch)
    sums = {
        prefix: [
            [float((weights > 0).sum()), *(float((weights * part).sum()) for part in (weights > 0, labels, losses))]
        ]
        for prefix, (weights, labels, losses) in before.items()
    }
    order = np.arange(batch.batch_size)
    real = np.flatnonzero(batch.is_present.cpu().numpy())
    order[real] = np.random.default_rng(seed).permutation(real)
    shuffle = torch.from_numpy(order).to(batch.labels.device)
    for index in range(len(dense_names)):
        dense = batch.dense_features.clone()
        dense[:, index] = dense[shuffle, index]
        _add(sums, before, _losses(model, task, replace(batch, dense_features=dense)))
    for key in batch.sparse_features.keys():  # noqa: SIM118 - no mapping
        _add(sums, before, _losses(model, task, with_shuffled(batch, key, shuffle)))
    return {prefix: torch.tensor(rows, dtype=torch.float64) for prefix, rows in sums.items()}


Losses = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _add(sums: dict[str, list[list[float]]], before: Losses, after: Losses) -> None:
    """Add the row of a feature to the sums of each label, from the losses before and after it was shuffled."""
    for prefix, (weights, _, losses) in after.items():
        added, squares = losses - before[prefix][2], weights.square()
        parts = (weights > 0, added, added.square())
        sums[prefix].append([float((weights * added).sum()), *(float((squares * part).sum()) for part in parts)])


def _losses(model: nn.Module, task: Any, batch: Batch) -> Losses:
    """Return for each binary label three tensors [batch]: weights, labels, and log losses in nats."""
    watchdog.beat(phase="evaluating")
    _, prediction = model(batch)
    found = {}
    for prefix, each in clicks_of(task, prediction).items():
        labels = each.labels.double()
        losses = binary_cross_entropy_with_logits(each.logits.double(), labels, reduction="none")
        found[prefix] = each.sample_weights.double(), labels, losses
    if not found:
        raise TrainingError("importance_rows: this model gives no probability of a click, which the importance needs")
    return found


def with_shuffled(batch: Batch, key: str, order: torch.Tensor) -> Batch:
    """Return the batch in which row i has the ids of feature `key` from row `order[i]`."""
    feature = batch.sparse_features[key]
    offsets, count, own = feature.offsets(), feature.lengths()[order], feature.weights_or_none()
    begins = torch.repeat_interleave(offsets[order], count)
    within = torch.arange(len(begins), device=begins.device) - torch.repeat_interleave(
        torch.cumsum(count, 0) - count, count
    )
    rows = begins + within
    shuffled = JaggedTensor(feature.values()[rows], None if own is None else own[rows], count)
    return replace(batch, sparse_features=with_features(batch.sparse_features, {key: shuffled}))


def _summarized(
    names: list[str], sums: np.ndarray[Any, np.dtype[np.float64]]
) -> tuple[dict[str, Any] | None, str]:  # fmt: skip
    """Return the result from the sums, and "". If NE is undefined, return None, and the reason."""
    rows, weight, positives, loss = sums[0]
    rate = positives / weight if weight else 0.0
    if rows < 2 or not 0.0 < rate < 1.0:
        return None, f"importance_rows: {rows:.0f} rows with label rate {rate:.3g}: use more rows"
    entropy = binary_entropy(rate)
    features = {}
    for name, (total, squares, of_added, of_squares) in zip(names, sums[1:], strict=True):
        mean = total / weight
        # sum of w^2 (added - mean)^2, the variance of a weighted sum of independent rows
        spread = max(of_squares - 2 * mean * of_added + mean**2 * squares, 0.0) * rows / (rows - 1)
        features[name] = {"ne_increase": float(mean / entropy), "error": float(np.sqrt(spread) / weight / entropy)}
    return {"rows": int(rows), "ne": float(loss / weight / entropy), "features": features}, ""
