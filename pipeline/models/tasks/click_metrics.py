"""Measure predictions of clicks: NE, logloss, calibration and label rate by TorchRec; AUC and AUPRC
by us.

To measure AUC and AUPRC of any number of rows in constant memory, weights are summed by label and
bucket of logits. Rows of a bucket are treated as equal scores. Both metrics report an upper bound
of the error that this causes. It is only a bound, because rows with really equal scores cause no
error. Buckets are the upper bits of a float32: BUCKETS_OF_OCTAVE of equal width between two powers
of 2, for magnitudes from 2**-12 to 2**8. Smaller and larger ones are in the first and last bucket
of their sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchmetrics import Metric
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.ctr import CTRMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.ne import NEMetric

from pipeline.data.quality import Floats, auc, ranked_groups
from pipeline.devices.cpu.host_exchange import all_gather
from pipeline.runtime.process.distributed import DistributedContext

TASK = RecTaskInfo(name="click", label_name="label", prediction_name="prediction", weight_name="weight")
# TorchRec's metric keys and ours. TorchRec's logloss is in bits (log2); ours is in nats.
NAMES = {"ne-click|{}_ne": "ne", "ne-click|{}_logloss": "logloss", "calibration-click|{}_calibration": "calibration"}
BATCHES_AT_ONCE = 64
EXACT_ROWS = 1 << 24  # rows up to which AUC is exact: 144 MiB of logits, labels and weights
COUNTED_AT_ONCE = 1 << 20  # rows that are counted into buckets at a time
LABEL_RATE = "ctr-click|{}_ctr"


class Prediction(NamedTuple):
    """Hold detached tensors of shape [batch], float32. sample_weights are 0.0 for padding rows."""

    loss: torch.Tensor  # scalar
    logits: torch.Tensor
    labels: torch.Tensor
    sample_weights: torch.Tensor


class RunningMetrics:
    """Measure NE, logloss [nats], calibration and label rate over all ranks.

    NE is NaN if all labels are equal. Calibration (sum of predictions / sum of labels) is NaN
    without a positive label. window_samples: about how many of the last samples of all ranks count;
    None: all.
    """

    def __init__(self, context: DistributedContext, batch_size: int, window_samples: int | None = None) -> None:
        def make(metric: type, **extra: bool):  # type: ignore[no-untyped-def]
            return metric(
                world_size=context.world_size,
                my_rank=context.rank,
                batch_size=batch_size,
                tasks=[TASK],
                window_size=max(window_samples or 0, batch_size * context.world_size),
                compute_on_all_ranks=True,
                process_group=dist.group.WORLD,
                # one rank would still gather each state from itself
                sync_on_compute=context.world_size > 1,
                **extra,
            ).to(context.device)

        self._metrics = [make(NEMetric, include_logloss=True), make(CalibrationMetric), make(CTRMetric)]
        for state in (each for metric in self._metrics for each in metric.modules() if isinstance(each, Metric)):
            # torchmetrics' function gathers sizes and calls a barrier before each state
            state.dist_sync_fn = _gathered
        self._prefix = "window" if window_samples else "lifetime"
        self._pending: list[Prediction] = []

    def update(self, prediction: Prediction) -> None:
        """Add a batch. Several batches are updated together, because an update takes as long as a
        small model's step.
        """
        self._pending.append(prediction)
        if len(self._pending) == BATCHES_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        logits, labels, weights = (
            torch.cat([getattr(prediction, name) for prediction in self._pending]).double()
            for name in ("logits", "labels", "sample_weights")
        )
        self._pending.clear()
        values = {"predictions": torch.sigmoid(logits), "labels": labels, "weights": weights}
        for metric in self._metrics:
            metric.update(**{name: {TASK.name: value} for name, value in values.items()})

    def compute(self) -> dict[str, float]:
        """Collective: return the metrics, equal on every rank."""
        self._flush()
        raw = {name: float(value) for metric in self._metrics for name, value in metric.compute().items()}
        values = {name: raw[torchrec_name.format(self._prefix)] for torchrec_name, name in NAMES.items()}
        values["logloss"] *= math.log(2.0)
        rate = values["label_rate"] = raw[LABEL_RATE.format(self._prefix)]
        # the entropy of the label rate is 0, and TorchRec divides by its epsilon
        if rate in (0.0, 1.0):
            values["ne"] = math.nan
            values["calibration"] = values["calibration"] if rate else math.nan
        return values


def _gathered(state: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Collective: return the metric's state of each rank. The state must have one shape on all ranks."""
    return list(all_gather(state))


class ScoreCollector:
    """Compute AUC and AUPRC of all ranks' samples in bounded memory.

    Up to `exact_rows` samples of all ranks are kept (9 bytes each: logit, label, weight), and rank
    0 sorts them. If there are more samples, they are counted by buckets of logits (10 MiB), and the
    result states its error.
    """

    def __init__(self, exact_rows: int = EXACT_ROWS) -> None:
        self._exact_rows, self._num_kept, self._num_counted = exact_rows, 0, 0
        self._logits: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._counts: ScoreCounts | None = None

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of samples and counts on this rank."""
        counted = 0 if self._counts is None else self._counts.counts.nbytes
        return counted + sum(part.nbytes for part in (*self._logits, *self._labels, *self._weights))

    def update(self, prediction: Prediction) -> None:
        real = prediction.sample_weights > 0
        self._logits.append(prediction.logits[real].cpu())
        self._labels.append(prediction.labels[real].to(torch.uint8).cpu())
        self._weights.append(prediction.sample_weights[real].float().cpu())
        self._num_kept += len(self._labels[-1])
        if self._num_kept > (self._exact_rows if self._counts is None else COUNTED_AT_ONCE):
            self._count()

    def _count(self) -> ScoreCounts:
        """Move the kept samples into the buckets."""
        counts = self._counts = self._counts or ScoreCounts()
        if self._logits:
            logits, *others = (torch.cat(parts) for parts in (self._logits, self._labels, self._weights))
            counts.add(logits.float().numpy(), *(other.numpy() for other in others))
        self._num_counted += self._num_kept
        self._logits, self._labels, self._weights, self._num_kept = [], [], [], 0
        return counts

    def compute(self, context: DistributedContext) -> dict[str, float]:
        """Collective: return AUC, AUPRC and the number of all ranks' samples.

        If buckets were used, `auc_error` and `auprc_error` bound the distance from the exact
        values.
        """
        num_samples = torch.tensor(self._num_counted + self._num_kept, device=context.device)
        dist.all_reduce(num_samples)
        found = self._by_buckets(context) if int(num_samples) > self._exact_rows else self._exact(context)
        values = torch.tensor(found, dtype=torch.float64, device=context.device)
        dist.broadcast(values, src=0)
        area, precision_area, *errors = values.tolist()
        named = dict(zip(("auc_error", "auprc_error"), errors, strict=False))
        return {"auc": area, "auprc": precision_area, "num_samples": int(num_samples), **named}

    def _exact(self, context: DistributedContext) -> list[float]:
        kinds = ((self._logits, torch.float32), (self._labels, torch.uint8), (self._weights, torch.float32))
        local = [torch.cat(parts) if parts else torch.empty(0, dtype=kind) for parts, kind in kinds]
        rows = [gather_to_main(values, context).numpy() for values in local]
        return [auc(*rows), auprc(*rows)] if context.is_main else [0.0, 0.0]

    def _by_buckets(self, context: DistributedContext) -> list[float]:
        """Return AUC, AUPRC and their errors from the buckets."""
        # a copy, because compute() may be called again
        total = torch.from_numpy(self._count().counts.copy()).to(context.device)
        dist.reduce(total, dst=0)
        if not context.is_main:
            return [0.0] * 4
        counts = ScoreCounts(total.cpu().numpy())
        area, precision_area = counts.auc(), counts.auprc()
        return [area.value, precision_area.value, area.error, precision_area.error]


def gather_to_main(local: torch.Tensor, context: DistributedContext) -> torch.Tensor:
    """Collective: join the 1-D tensors of all ranks on rank 0. Other ranks get an empty tensor."""
    if context.world_size == 1:
        return local.cpu()
    size = torch.tensor([len(local)], device=context.device)
    sizes = [torch.zeros_like(size) for _ in range(context.world_size)]
    dist.all_gather(sizes, size)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=local.dtype, device=context.device)
    padded[: len(local)] = local.to(context.device)
    gathered = [torch.empty_like(padded) for _ in sizes] if context.is_main else None
    dist.gather(padded, gathered, dst=0)
    if gathered is None:
        return local[:0]
    return torch.cat([part[: int(length)].cpu() for part, length in zip(gathered, sizes, strict=True)])


def auprc(
    scores: NDArray[np.floating], labels: NDArray[np.number], weights: NDArray[np.floating] | None = None
) -> float:
    """Return the average precision: the sum over thresholds of precision times the increase of recall."""
    positives, sizes = ranked_groups(scores, labels, weights) if len(scores) else (np.zeros(0), np.zeros(0))
    if not positives.sum():
        return math.nan
    precision = positives.cumsum() / sizes.cumsum()
    return float((precision * positives).sum() / positives.sum())


MANTISSA_BITS, KEPT_BITS = 23, 14
BUCKETS_OF_OCTAVE = 1 << KEPT_BITS
LEAST, MOST = (int(np.array(edge, np.float32).view(np.int32)) for edge in (2.0**-12, 2.0**8))
BUCKETS_OF_SIGN = (MOST - LEAST) >> (MANTISSA_BITS - KEPT_BITS)
BUCKETS = 2 * BUCKETS_OF_SIGN


class Bounded(NamedTuple):
    """Hold a metric and the largest possible distance from its exact value."""

    value: float
    error: float


def bucket_of(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return [n] in 0 to BUCKETS - 1, ascending with the logit. NaN is in the last bucket."""
    positive_zeros = logits + np.float32(0.0)
    bits = positive_zeros.view(np.int32)
    magnitudes = np.clip(bits & 0x7FFFFFFF, LEAST, MOST - 1)
    steps = ((magnitudes - LEAST) >> (MANTISSA_BITS - KEPT_BITS)).astype(np.int64)
    is_below = (bits < 0) & ~np.isnan(logits)
    buckets: NDArray[np.int64] = np.where(is_below, BUCKETS_OF_SIGN - 1 - steps, BUCKETS_OF_SIGN + steps)
    return buckets


def _zeros() -> Floats:
    return np.zeros((2, BUCKETS))


@dataclass
class ScoreCounts:
    """Sum the weights of rows by label and bucket: `counts` [2, BUCKETS]."""

    counts: Floats = field(default_factory=_zeros)

    def add(self, logits: NDArray[np.float32], labels: NDArray[np.uint8], weights: NDArray[np.floating]) -> None:
        buckets = bucket_of(logits)
        for label in (0, 1):
            rows = labels == label
            self.counts[label] += np.bincount(buckets[rows], weights[rows], minlength=BUCKETS)

    def auc(self) -> Bounded:
        """Return AUC; NaN if all labels are equal. A positive and a negative row in one bucket count 1/2 +- 1/2."""
        negatives, positives = self._best_first()
        pairs = positives.sum() * negatives.sum()
        if not pairs:
            return Bounded(math.nan, 0.0)
        above = positives.cumsum() - positives
        undecided = (negatives * positives).sum() / 2
        return Bounded(float(((negatives * above).sum() + undecided) / pairs), float(undecided / pairs))

    def auprc(self) -> Bounded:
        """Return AUPRC, or NaN without a positive.

        In the best case all positives of a bucket come before its negatives, in the worst case
        after.
        """
        negatives, positives = self._best_first()
        if not positives.sum():
            return Bounded(math.nan, 0.0)
        found = positives.cumsum()
        rows = (positives + negatives).cumsum()
        found_before, rows_before = found - positives, rows - positives - negatives

        def mean(precision: Floats) -> float:
            return float((precision * positives).sum() / positives.sum())

        def share(part: Floats, whole: Floats) -> Floats:
            return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)

        value = mean(share(found, rows))
        most = mean(share(found, rows_before + positives))
        least = mean(share(found_before, rows_before + negatives))
        return Bounded(value, max(most - value, value - least))

    def _best_first(self) -> tuple[Floats, Floats]:
        """Return the weights of label 0 and of label 1 in each bucket; the bucket with the highest logits is first."""
        negatives, positives = self.counts[:, ::-1]
        return negatives, positives
