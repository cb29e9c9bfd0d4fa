"""Measure metrics of groups, and metrics by name, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.config.registry import FEATURE, find_metric
from pipeline.data.quality import Floats, probabilities
from pipeline.data.read.batch import Batch, first_ids
from pipeline.models.metrics.groups import group_sums, metrics_of
from pipeline.models.metrics.metric import GroupMetric, Metric
from pipeline.runtime.process.distributed import DistributedContext

NUM_PARTS = 64
PAIRED_ROWS = 1 << 20  # of a metric of pairs: with more rows, only pairs within a part of the batches count
# groups, outputs, labels and weights [rows] -> sums [k], of a part with all rows of its groups
OfPart = Callable[[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]], Floats]


class GroupedRows:
    """Keep each row's group, output, label and weight (20 bytes), and add up sums over groups.

    A hash assigns each group to one of NUM_PARTS parts, and each part to a rank, which gets all rows
    of the part. So the ranks share the memory and the work, and a part's sums do not depend on the
    number of ranks.
    """

    def __init__(self, context: DistributedContext) -> None:
        self._context = context
        self._groups: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []  # [rows, 3]

    def add(self, groups: torch.Tensor, prediction: Any, with_missing: bool = True) -> None:
        """Local: add a batch. groups: [batch] int64. with_missing: rows of group 0 count too."""
        weights = prediction.sample_weights.cpu()
        kept = (weights > 0) if with_missing else (weights > 0) & (groups != 0)
        self._groups.append(groups[kept])
        columns = [prediction.logits.cpu(), prediction.labels.cpu(), weights]
        self._rows.append(torch.stack([column[kept].float() for column in columns], dim=1))

    def sums(self, functions: Sequence[OfPart]) -> list[Floats]:
        """Collective: return the sums of each function over all parts, equal on every rank."""
        no_rows = np.zeros(0, np.float32)
        sizes = [len(function(np.zeros(0, np.int64), no_rows, no_rows, no_rows)) for function in functions]
        found = torch.zeros((NUM_PARTS, sum(sizes)), dtype=torch.float64)
        for part, groups, rows in self._parts():
            found[part] = torch.from_numpy(np.concatenate([function(groups, *rows.T) for function in functions]))
        found = found.to(self._context.device)
        if self._context.world_size > 1:
            dist.all_reduce(found)  # only one rank has a part, so nothing is rounded
        return np.split(found.cpu().numpy().sum(axis=0), np.cumsum(sizes)[:-1])

    def _parts(self) -> list[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
        """Collective: return the parts of this rank: number, groups [n] and rows [n, 3]."""
        size = self._context.world_size
        groups = torch.cat(self._groups) if self._groups else torch.zeros(0, dtype=torch.int64)
        rows = torch.cat(self._rows) if self._rows else torch.zeros((0, 3))
        if size > 1:
            to_rank = torch.from_numpy(_part_of(groups.numpy()) % size)
            by_rank, counts = torch.argsort(to_rank), torch.bincount(to_rank, minlength=size)
            groups, rows = (_exchanged(each[by_rank], counts, self._context) for each in (groups, rows))
        part = _part_of(groups.numpy())
        order = np.argsort(part, kind="stable")
        numbers, begins = np.unique(part[order], return_index=True)
        split = (np.split(each.numpy()[order], begins[1:]) for each in (groups, rows))
        return list(zip(numbers.tolist(), *split, strict=True)) if len(numbers) else []


def _part_of(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the part of each group: the upper bits of a multiplicative hash (Knuth 1998, section 6.4)."""
    hashes = groups.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (hashes >> np.uint64(64 - NUM_PARTS.bit_length() + 1)).astype(np.int64)


def _exchanged(rows: torch.Tensor, counts: torch.Tensor, context: DistributedContext) -> torch.Tensor:
    """Collective: send counts[r] of the rows, which are in the order of ranks, to each rank r.
    Return the rows that this rank gets."""
    sent = counts.to(context.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    out = torch.empty((int(received.sum()), *rows.shape[1:]), dtype=rows.dtype, device=context.device)
    dist.all_to_all_single(out, rows.to(context.device).contiguous(), received.tolist(), counts.tolist())
    return out.cpu()


class GroupMeasure:
    """Measure gauc, ndcg_at_<k>, hit_rate_at_<k> of groups (pipeline.models.metrics.groups)."""

    def __init__(self, context: DistributedContext, at: list[int]) -> None:
        self._rows, self._at = GroupedRows(context), at

    def update(self, prediction: Any, groups: torch.Tensor | None) -> None:
        """Local: add a batch of logits, labels and sample_weights, each [batch]. Rows of group 0 belong to no group."""
        if groups is not None:
            self._rows.add(groups, prediction, with_missing=False)

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics (see groups.group_metrics), equal on every rank."""

        def of_part(groups: NDArray[np.int64], logits: Any, labels: Any, weights: Any) -> Floats:
            return group_sums(groups, logits, labels, self._at, weights)

        (sums,) = self._rows.sums([of_part])
        return metrics_of(sums, self._at)


class NamedMetrics:
    """Measure registered metrics. A name is a metric's, or a metric's and a feature's, such as
    gauc:user, whose first ids are the groups.
    """

    def __init__(self, context: DistributedContext, names: Sequence[str], num_rows: int = 0) -> None:
        """num_rows: of the split. Raises ConfigError if a name is not registered."""
        self._context = context
        self._metrics: dict[str, Metric] = {name: find_metric(name, "trainer.metrics")() for name in names}
        self._sums: dict[tuple[str, str], Floats] = {}  # of a label's prefix and a metric
        self._rows: dict[tuple[str, str, bool], GroupedRows] = {}  # of a prefix and a source of groups; is it binary
        self._num_blocks, self._num_batches = max(1, -(-num_rows // PAIRED_ROWS)), 0

    def update(
        self, clicks: Mapping[str, Any], batch: Batch | None = None, numbers: Mapping[str, Any] | None = None
    ) -> None:
        """Local: add a batch. clicks, numbers: prefix of a label's metrics -> the logits, labels and
        weights of the label. The logits of a label that is a number are the predicted values.
        """
        for kind, predictions in (("binary", clicks), ("number", numbers or {})) if self._metrics else ():
            named = {name: metric for name, metric in self._metrics.items() if kind in metric.kinds}
            for prefix, prediction in predictions.items():
                self._add_sums(prefix, prediction, named)
                for source in sorted({_source(name, metric) for name, metric in named.items()} - {NO_GROUPS}):
                    rows = self._rows.setdefault((prefix, source, kind == "binary"), GroupedRows(self._context))
                    rows.add(self._groups(source, batch, len(prediction.labels)), prediction)
        self._num_batches += 1

    def _add_sums(self, prefix: str, prediction: Any, named: Mapping[str, Metric]) -> None:
        alone = {name: metric for name, metric in named.items() if _source(name, metric) == NO_GROUPS}
        if not alone:
            return
        weights = prediction.sample_weights.double()
        counts = weights > 0
        predictions = torch.sigmoid(prediction.logits.double())[counts].cpu().numpy()
        labels, weights = (values[counts].cpu().numpy() for values in (prediction.labels.double(), weights))
        for name, metric in alone.items():
            sums = metric.sums(predictions, labels, weights)
            self._sums[prefix, name] = self._sums.get((prefix, name), 0.0) + sums

    def _groups(self, source: str, batch: Batch | None, num_rows: int) -> torch.Tensor:
        if source == ALL_ROWS:
            return torch.full((num_rows,), 1 + self._num_batches % self._num_blocks)
        assert batch is not None, "groups of a metric need the batch"
        if source:
            return torch.from_numpy(first_ids(batch.sparse_features[source]))
        return torch.zeros(num_rows, dtype=torch.int64) if batch.groups is None else batch.groups

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        found = {}
        for (prefix, name), sums in self._sums.items():
            total = torch.as_tensor(sums, dtype=torch.float64).to(self._context.device)
            if self._context.world_size > 1:
                dist.all_reduce(total)
            found[prefix + name] = float(self._metrics[name].value(total.cpu().numpy()))
        for (prefix, source, is_binary), rows in self._rows.items():
            kind = "binary" if is_binary else "number"
            named = {
                name: metric
                for name, metric in self._metrics.items()
                if isinstance(metric, GroupMetric) and kind in metric.kinds and _source(name, metric) == source
            }
            totals = rows.sums([partial(_of_part, metric, is_binary) for metric in named.values()])
            for (name, metric), of_metric in zip(named.items(), totals, strict=True):
                found[prefix + name] = float(metric.value(of_metric))
        return found


ALL_ROWS, NO_GROUPS = "*", "-"  # sources of groups, in addition to features, and "" for data.group_column


def _source(name: str, metric: Metric) -> str:
    """Return where a metric's groups come from."""
    if not isinstance(metric, GroupMetric):
        return NO_GROUPS
    return name.partition(FEATURE)[2] or (ALL_ROWS if metric.of_all_rows else "")


def _of_part(
    metric: GroupMetric, is_binary: bool, groups: NDArray[np.int64], outputs: Any, labels: Any, weights: Any
) -> Floats:
    scores, labels, weights = (each.astype(np.float64) for each in (outputs, labels, weights))
    return metric.sums_of_groups(probabilities(scores) if is_binary else scores, labels, weights, groups)
