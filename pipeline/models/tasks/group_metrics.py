"""Measure GAUC, NDCG@k and hit rate@k within groups, and metrics by name, over all ranks.

GAUC is the mean of the groups' AUCs, weighted by their rows (Zhou et al. 2018, Deep Interest
Network, section 6.2). A row of weight w occupies w positions of the ranking. If only a part of a
row is within the first k positions, only this part counts. NamedMetrics are those of
trainer.metrics, for each binary label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.config.registry import find
from pipeline.data.quality import Floats
from pipeline.models.metrics.metric import Metric
from pipeline.models.tasks.click_metrics import gather_to_main
from pipeline.runtime.process.distributed import DistributedContext


class GroupMeasure:
    """Keep each row's group, logit, label and weight (17 bytes), and gather them on rank 0."""

    def __init__(self, context: DistributedContext, at: list[int]) -> None:
        self._context, self._at = context, at
        self._groups: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []

    def update(self, prediction: Any, groups: torch.Tensor | None) -> None:
        """Local: add a batch of logits, labels and sample_weights, each [batch]. Rows of group 0 belong to no group."""
        if groups is None:
            return
        weights = prediction.sample_weights.cpu()
        real = (weights > 0) & (groups != 0)
        self._groups.append(groups[real])
        self._logits.append(prediction.logits.cpu()[real])
        self._labels.append(prediction.labels.cpu()[real].to(torch.uint8))
        self._weights.append(weights[real].float())

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics (see group_metrics), equal on every rank."""
        kinds = (torch.int64, torch.float32, torch.uint8, torch.float32)
        parts = zip((self._groups, self._logits, self._labels, self._weights), kinds, strict=True)
        local = [torch.cat(part) if part else torch.empty(0, dtype=kind) for part, kind in parts]
        groups, logits, labels, weights = (gather_to_main(values, self._context).numpy() for values in local)
        names = list(group_metrics(groups[:0], logits[:0], labels[:0], self._at))
        values = torch.zeros(len(names), dtype=torch.float64)
        if self._context.is_main:
            found = group_metrics(groups, logits, labels, self._at, weights)
            values = torch.tensor([found[name] for name in names], dtype=torch.float64)
        values = values.to(self._context.device)
        dist.broadcast(values, src=0)
        return {
            name: int(value) if name.startswith("num_") else value
            for name, value in zip(names, values.tolist(), strict=True)
        }


def group_metrics(
    groups: NDArray[np.int64],
    scores: NDArray[np.floating],
    labels: NDArray[np.number],
    at: list[int],
    weights: NDArray[np.floating] | None = None,
) -> dict[str, float]:
    """Return gauc, ndcg_at_<k>, hit_rate_at_<k>, num_groups and num_one_class_groups of rows [n].

    weights: of the rows, 1 by default.

    Each group counts once in ndcg and hit rate. A group with labels of one class is left out of all
    metrics and only counted. For rows with equal scores the mean over all their orders is used, so
    the order of rows does not matter. Metrics are NaN if every group is left out.
    """
    ties, num_groups = _ties_of(groups, scores, labels, np.ones(len(labels)) if weights is None else weights)
    positives, rows = ties.total(ties.positives), ties.total(ties.sizes)
    ranked = (positives > 0) & (positives < rows)
    found = {"gauc": _mean(_aucs(ties, positives, rows)[ranked], rows[ranked])}
    found |= {f"ndcg_at_{k}": _mean(_ndcg(ties, positives, k)[ranked]) for k in at}
    found |= {f"hit_rate_at_{k}": _mean(_hits(ties, k)[ranked]) for k in at}
    return found | {"num_groups": num_groups, "num_one_class_groups": int(num_groups - ranked.sum())}


@dataclass(frozen=True)
class _Ties:
    """Hold ties: runs of rows of one group with equal scores, sorted by group, then best first.

    All fields are [num_ties], except `firsts` [num_groups]. Rows and positives count by weight.
    """

    sizes: Floats
    positives: Floats
    before: Floats  # rows of the group with a higher score
    positives_before: Floats
    firsts: NDArray[np.int64]  # the index of each group's first run

    def total(self, values: Floats) -> Floats:
        """Return [num_groups]: the sum of `values` [num_ties] over the ties of each group."""
        sums: Floats = np.add.reduceat(values, self.firsts) if len(self.firsts) else np.zeros(0)
        return sums


def _ties_of(
    groups: NDArray[np.int64], scores: NDArray[np.floating], labels: NDArray[np.number], weights: NDArray[np.floating]
) -> tuple[_Ties, int]:
    order = np.lexsort((-scores, groups))
    groups, scores, labels, weights = groups[order], scores[order], labels[order], weights[order].astype(np.float64)
    new_group = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    new_tie = new_group.copy()
    new_tie[1:] |= scores[1:] != scores[:-1]
    starts = np.flatnonzero(new_tie)
    sizes, positives = (
        np.add.reduceat(values, starts) if len(starts) else np.zeros(0) for values in (weights, weights * labels)
    )
    firsts = np.flatnonzero(new_group[starts])
    group_of = np.cumsum(new_group[starts]) - 1
    before, positives_before = (np.cumsum(values) - values for values in (sizes, positives))
    before, positives_before = (values - values[firsts][group_of] for values in (before, positives_before))
    return _Ties(sizes, positives, before, positives_before, firsts), len(firsts)


def _aucs(ties: _Ties, positives: Floats, rows: Floats) -> Floats:
    """Return the AUC of each group [num_groups]. The value of a group with one class has no meaning."""
    above = (ties.sizes - ties.positives) * (ties.positives_before + ties.positives / 2)
    pairs = positives * (rows - positives)  # below 1 if weights are small
    aucs: Floats = ties.total(above) / np.where(pairs > 0, pairs, 1.0)
    return aucs


def _ndcg(ties: _Ties, positives: Floats, k: int) -> Floats:
    """Return the NDCG of each group [num_groups]. Rows with equal scores share their positives
    evenly over their positions (McSherry, Najork 2008).
    """
    discounts = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(k) + 2.0))])
    places = np.arange(k + 1.0)
    first, last, best = (np.interp(at, places, discounts) for at in (ties.before, ties.before + ties.sizes, positives))
    gains = ties.positives / ties.sizes * (last - first)
    ndcg: Floats = ties.total(gains) / np.where(best > 0, best, 1.0)
    return ndcg


def _hits(ties: _Ties, k: int) -> Floats:
    """Return [num_groups]: the probability that a positive is among the first k, over all orders of equal scores."""
    end = ties.before + ties.sizes
    missed = np.where((ties.positives > 0) & (end <= k), 0.0, 1.0)
    for run in np.flatnonzero((ties.before < k) & (end > k) & (ties.positives > 0)):
        # without replacement: the chance that each of the first places goes to a negative
        places = k - ties.before[run]
        taken = np.arange(math.ceil(places))
        left = np.maximum(ties.sizes[run] - ties.positives[run] - taken, 0.0) / (ties.sizes[run] - taken)
        chances = np.append(1.0, np.cumprod(left))
        missed[run] = np.interp(places, np.arange(len(chances)), chances)
    products = np.multiply.reduceat(missed, ties.firsts) if len(ties.firsts) else np.zeros(0)
    hits: Floats = 1.0 - products
    return hits


def _mean(values: Floats, weights: Floats | None = None) -> float:
    return float(np.average(values, weights=weights)) if len(values) else math.nan


class NamedMetrics:
    """Add up the sums of registered metrics over the batches of an evaluation."""

    def __init__(self, context: DistributedContext, names: Sequence[str]) -> None:
        """Raises ConfigError if a name is not registered."""
        self._context = context
        self._metrics: dict[str, Metric] = {name: find("metric", name, "trainer.metrics")() for name in names}
        self._sums: dict[str, Floats] = {}

    def update(self, clicks: Mapping[str, Any]) -> None:
        """Local: add a batch. clicks: prefix of a label's metrics -> the logits, labels and weights of the label."""
        for prefix, prediction in clicks.items() if self._metrics else ():
            weights = prediction.sample_weights.double()
            counts = weights > 0
            predictions = torch.sigmoid(prediction.logits.double())[counts].cpu().numpy()
            labels, weights = (values[counts].cpu().numpy() for values in (prediction.labels.double(), weights))
            for name, metric in self._metrics.items():
                sums = metric.sums(predictions, labels, weights)
                self._sums[prefix + name] = self._sums.get(prefix + name, 0.0) + sums

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        found = {}
        for name, sums in self._sums.items():
            total = torch.as_tensor(sums, dtype=torch.float64).to(self._context.device)
            if self._context.world_size > 1:
                dist.all_reduce(total)
            found[name] = float(self._metrics[name.rpartition("/")[2]].value(total.cpu().numpy()))
        return found
