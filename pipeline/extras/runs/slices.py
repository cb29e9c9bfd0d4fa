"""Measure each value of a feature separately: `evaluate run=RUN slices=[country,country*device]`

A number is cut into tenths of the rows. Rank 0 joins the rows of all ranks, so any number of
ranks gives the same result. All sums are weighted. An error is a standard error over
independent rows: DeLong's for the AUC (DeLong et al. 1988), by the delta method otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.jobs.train import TrainJob
from pipeline.config.registry import find_metric
from pipeline.data.dataset import Dataset
from pipeline.data.quality import Floats, auc, binary_entropy, log_losses, probabilities
from pipeline.data.read.batch import Batch, first_ids
from pipeline.data.read.reader import ShardReader
from pipeline.extras.runs.evaluation_stats import auc_terms
from pipeline.extras.runs.report_features import value_names
from pipeline.models.metrics.metric import GroupMetric, Metric
from pipeline.models.tasks.click_metrics import EXACT_ROWS, gather_to_main
from pipeline.planner.explain import print_grid
from pipeline.runtime.errors import ConfigError, TrainingError, did_you_mean
from pipeline.runtime.logs import to_json
from pipeline.runtime.pages.html import fixed
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage import storage

SUFFIX = ".slices.json"
MAX_VALUES = 50  # of each slice in the file and on the page; further values are one row
MAX_PRINTED = 10
NUM_PARTS = 10  # of a number
FEW = 10
ALL, CROSS = "all rows", "*"
HEADINGS = ("value", "rows", "label rate", "prediction", "calibration", "NE", "AUC")


# A number, None if it is undefined, as the AUC of rows with equal labels. Its standard error, None
# with fewer than FEW rows of a label, because the error of so few rows is unknown.
Estimate = tuple[float | None, float | None]


@dataclass(frozen=True)
class SliceOfRows:
    """The measurements of the rows with one value of `by`. named: registered metrics."""

    label: str
    by: str
    value: str
    rows: int  # not weighted
    share: float  # of all rows, by weight
    label_rate: float
    prediction: float
    calibration: Estimate
    ne: Estimate
    auc: Estimate
    named: dict[str, float | None]

    def cells(self) -> list[str]:
        """Return the texts of HEADINGS, and of the named metrics."""
        known = (
            fixed(value) if value is None or error is None else f"{value:.4f} ± {2 * error:.4f}"
            for value, error in (self.calibration, self.ne, self.auc)
        )
        means = (fixed(value) for value in (self.label_rate, self.prediction))
        return [self.value, f"{self.rows:,}", *means, *known, *map(fixed, self.named.values())]


@dataclass(frozen=True)
class SlicesOfRows:
    """The slices of an evaluation. stride: every stride-th row of the split was used."""

    split: str
    step: int
    stride: int
    slices: list[SliceOfRows]

    def write(self, evaluation: str) -> None:
        """Write the slices next to `evaluation`, the JSON file of the metrics."""
        storage.publish_text(evaluation.removesuffix(".json") + SUFFIX, to_json(asdict(self), indent=1))

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Yield a title, the headings and the rows of each table."""
        for label, by in dict.fromkeys((each.label, each.by) for each in self.slices if each.by != ALL):
            found = [each for each in self.slices if each.label == label and each.by in (by, ALL)]
            yield (
                f"{label}: by {by}" if label else f"by {by}",
                [*HEADINGS, *found[0].named],
                [each.cells() for each in found],
            )

    def lines(self) -> list[str]:
        """Return the tables with their largest slices as lines for the terminal."""
        lines = []
        for title, headings, found in self.tables():
            hidden = len(found) - 1 - MAX_PRINTED
            lines += ["", f"slices {title}{self.sampled()}, ± two standard errors"]
            lines += print_grid(headings, found[: MAX_PRINTED + 1], right=headings[1:]).splitlines()
            lines += [f"... and {hidden} more in the file *{SUFFIX}"] if hidden > 0 else []
        return [*lines, ""] if lines else []

    def sampled(self) -> str:
        return f", of every {self.stride}th row" if self.stride > 1 else ""


def read_slices(path: str) -> SlicesOfRows | None:
    """Read a file of slices; None if it is missing or another file."""
    try:
        values = json.loads(storage.read_text(path)) if storage.is_file(path) else {}
        return SlicesOfRows(**values | {"slices": [SliceOfRows(**each) for each in values["slices"]]})
    except (KeyError, TypeError, ValueError):
        return None


class SliceRows:
    """Collects what slices are measured from: for each row its values, and for each binary label its
    logit, label and weight. If the split has more than EXACT_ROWS rows, only every n-th row is used.
    """

    def __init__(
        self, names: list[str], job: TrainJob, dataset: Dataset, reader: ShardReader, context: DistributedContext
    ) -> None:
        """names: slices=[...]. Raises ConfigError if one is not a feature that the model's data have."""
        metrics: dict[str, Metric] = {name: find_metric(name, "metrics")() for name in job.trainer.metrics}
        own = {name: each for name, each in metrics.items() if not isinstance(each, GroupMetric)}
        self._slicer = Slicer(names, job.data.path, dataset, reader.plain_features, own)
        self._context = context
        self._stride = -(-reader.num_rows // EXACT_ROWS)
        self._positions = reader.positions(epoch=0)
        self._values: list[torch.Tensor] = []  # [rows, columns] float64, which holds each id exactly
        self._labels: dict[str, list[torch.Tensor]] = {}  # prefix -> [rows, 3]: logits, labels, weights

    def update(self, clicks: Mapping[str, Any], batch: Batch, prediction: Any) -> None:
        """Local: add a batch."""
        if not clicks:
            raise TrainingError("slices: the model predicts no binary label, which slices need; leave the key out")
        kept = batch.is_present.cpu() & torch.from_numpy(next(self._positions) % self._stride == 0)
        self._values.append(self._slicer.values_of(batch)[kept])
        for prefix, each in clicks.items():
            parts = [part.float().cpu() for part in (each.logits, each.labels, each.sample_weights)]
            self._labels.setdefault(prefix, []).append(torch.stack(parts, dim=1)[kept])

    def compute(self, split: str, step: int, metrics: dict[str, float]) -> SlicesOfRows | None:
        """Collective: return the slices on rank 0, None on other ranks."""
        values = self._gathered(self._values)
        labels = {prefix: self._gathered(parts) for prefix, parts in self._labels.items()}
        if not self._context.is_main:
            return None
        found = self._slicer.measured(values, {prefix.removesuffix("/"): rows for prefix, rows in labels.items()})
        return SlicesOfRows(split, step, self._stride, found)

    def _gathered(self, parts: list[torch.Tensor]) -> NDArray[Any]:
        """Collective: join the rows of all ranks on rank 0."""
        local = torch.cat(parts)
        return gather_to_main(local.flatten(), self._context).numpy().reshape(-1, local.shape[1])


class Slicer:
    """Divides rows by the values of features, and measures each part."""

    def __init__(
        self,
        names: list[str],
        folder: str,
        dataset: Dataset,
        plain_features: list[str],
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        """names: features, or crosses of features. folder: the data set, which has the names of
        values. plain_features: features whose ids are read unchanged. Raises ConfigError for a name
        that is not a feature.
        """
        self._names, self._dataset, self._folder, self._metrics = names, dataset, folder, metrics or {}
        self._columns = list(dict.fromkeys(column for name in names for column in name.split(CROSS)))
        self._dense = [name for name in self._columns if name in dataset.dense_features]
        for name in self._columns:
            _check(name, dataset, plain_features)

    def values_of(self, batch: Batch) -> torch.Tensor:
        """Return the values [rows, columns] float64 of the features, which hold each id exactly."""
        columns = [
            batch.dense_features[:, self._dataset.dense_features.index(name)].double().cpu()
            if name in self._dense
            else torch.from_numpy(first_ids(batch.sparse_features[name])).double()
            for name in self._columns
        ]
        return torch.stack(columns, dim=1) if columns else torch.empty(batch.batch_size, 0)

    def measured(self, values: Floats, labels: Mapping[str, NDArray[Any]]) -> list[SliceOfRows]:
        """Return all rows and each slice. labels: label -> rows [n, 3] of logit, label and weight."""
        weights = np.max([rows[:, 2] for rows in labels.values()], axis=0)  # a label's mask excludes rows
        groups = [(name, *self._groups(name, values, weights)) for name in self._names]
        found: list[SliceOfRows] = []
        for label, rows in labels.items():
            total = float(rows[:, 2].sum(dtype=np.float64))
            found += self._measured(label, ALL, ALL, rows, total)
            for by, names, group_of in groups:
                order = np.argsort(group_of, kind="stable")
                ends = np.cumsum(np.bincount(group_of, minlength=len(names)))[:-1]
                for name, part in zip(names, np.split(rows[order], ends), strict=True):
                    found += self._measured(label, by, name, part, total)
        return found

    def _groups(self, name: str, values: Floats, weights: Floats) -> tuple[list[str], NDArray[np.int64]]:
        """Return the names of the values of a slice, and for each row the number of its value."""
        columns = name.split(CROSS)
        parts, codes = [], np.zeros(len(values), np.int64)
        for column in columns:
            of_column = values[:, self._columns.index(column)]
            part = _tenths(of_column, weights) if column in self._dense else of_column.astype(np.int64)
            numbers = np.unique(part, return_inverse=True)[1]
            codes = np.unique(codes * (numbers.max(initial=0) + 1) + numbers, return_inverse=True)[1]
            parts.append((column, of_column, part))
        sums, firsts = np.bincount(codes, weights), np.unique(codes, return_index=True)[1]
        kept = np.arange(len(sums)) if name in self._dense else np.argsort(-sums, kind="stable")[:MAX_VALUES]
        texts = [self._texts(*part, firsts[kept]) for part in parts]
        names = [f" {CROSS} ".join(each) for each in zip(*texts, strict=True)]
        group_of = np.full(len(sums), len(kept))
        group_of[kept] = np.arange(len(kept))
        others = len(sums) - len(kept)
        return [*names, *([f"{others:,} other values"] if others else [])], group_of[codes]

    def _texts(
        self, column: str, values: Floats, part: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> list[str]:  # fmt: skip
        """Return the value of a column in `rows` as text; of a number the range of its tenth."""
        if column not in self._dense:
            known = value_names(self._folder, self._dataset, column, part[rows].tolist())
            return [known.get(id, "unknown or rare" if id == 0 else f"id {id}") for id in part[rows].tolist()]
        inside = {number: values[part == number] for number in np.unique(part[rows]).tolist()}
        ranges = {number: f"{found.min():.4g} to {found.max():.4g}" for number, found in inside.items()}
        return [ranges[number] for number in part[rows].tolist()]

    def _measured(self, label: str, by: str, value: str, rows: NDArray[Any], total: float) -> list[SliceOfRows]:
        """Return the slice of rows [n, 3] that count for the label; nothing if there are none."""
        rows = rows[rows[:, 2] > 0].astype(np.float64)
        if not len(rows):
            return []
        logits, labels, weights = rows.T
        scores = probabilities(logits)
        named = {
            name: None if math.isnan(found := metric.value(metric.sums(scores, labels, weights))) else found
            for name, metric in self._metrics.items()
        }
        rate, mean = (float(np.average(each, weights=weights)) for each in (labels, scores))
        share = float(weights.sum() / total)
        estimates = measure(logits, labels, weights)
        return [SliceOfRows(label, by, value, len(rows), share, rate, mean, *estimates, named)]


def measure(logits: Floats, labels: Floats, weights: Floats) -> tuple[Estimate, Estimate, Estimate]:
    """Return calibration, NE and AUC of rows [n]."""
    weight, positives, scores = weights.sum(), (weights * labels).sum(), probabilities(logits)
    rate, many = positives / weight, len(labels) / max(1, len(labels) - 1)
    none: Estimate = (None, None)
    is_few = min(np.count_nonzero(labels), np.count_nonzero(labels == 0)) < FEW

    def estimate(value: float, influences: Floats) -> Estimate:
        """influences: by how much each row moves the value, to first order."""
        return float(value), None if is_few else math.sqrt(many * float(np.square(influences).sum()))

    if not positives:
        return none, none, none
    ratio = (weights * scores).sum() / positives
    calibration = estimate(ratio, weights * (scores - ratio * labels) / positives)
    if rate >= 1.0:
        return calibration, none, none
    losses, entropy = log_losses(logits, labels), binary_entropy(rate)
    ne = (weights * losses).sum() / weight / entropy
    of_rate = ne * math.log((1 - rate) / rate) * (labels - rate)  # the entropy changes with the rate
    order = np.argsort(logits, kind="stable")
    tie_of = np.append(0, np.cumsum(logits[order][1:] != logits[order][:-1]))
    terms = auc_terms(labels.astype(np.int64), weights, order, tie_of)
    return (
        calibration,
        estimate(ne, weights * (losses - ne * entropy - of_rate) / weight / entropy),
        estimate(auc(logits, labels, weights), terms),
    )


def _tenths(values: Floats, weights: Floats) -> NDArray[np.int64]:
    """Return the number of each row's part, of NUM_PARTS parts of about equal weight. Equal values are
    in one part."""
    number_of = np.unique(values, return_inverse=True)[1]
    sums = np.bincount(number_of, weights)
    middles = (np.cumsum(sums) - sums / 2) / sums.sum()
    return np.minimum(middles * NUM_PARTS, NUM_PARTS - 1).astype(np.int64)[number_of]


def _check(name: str, dataset: Dataset, plain_features: list[str]) -> None:
    if name in dataset.dense_features or name in plain_features:
        return
    if name in dataset.sparse_feature_names:
        raise ConfigError(
            f"slices: table compression replaces the ids of {name!r} while reading; choose another feature"
        )
    known = [*dataset.dense_features, *plain_features]
    raise ConfigError(
        f"slices: {name!r} is not a feature of data set {dataset.name!r}, which has {', '.join(known[:30])}"
        f"{did_you_mean(name, known)}"
    )
