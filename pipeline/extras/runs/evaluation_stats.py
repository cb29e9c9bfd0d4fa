"""Store statistics of an evaluation: sums over blocks of rows, a reliability diagram, and slices
(without torch).

A block is a part of the split's files. It has the same rows in every run over this split, so the
blocks of two runs can be paired. All sums are weighted by the rows' sample weights. One Parquet
file has a row per block, and everything else as JSON in the file's metadata. Columns of a second
label are named <label>/<column>.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint.retention import is_higher_better
from pipeline.data.quality import binary_entropy, log_losses, probabilities
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import storage

SUFFIX = ".details.parquet"
NAME = re.compile(r"evaluation\.(\w+)\.step_(\d+)\.details\.parquet")
MAX_BLOCKS = 10_000
NUM_BINS = 20  # of the reliability diagram, with equal weight each
KEY = b"pipeline.evaluation"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bin:
    """Rows with similar predictions: their number, mean prediction and label rate."""

    rows: int
    prediction: float
    label_rate: float


@dataclass(frozen=True)
class Slice:
    """Weighted sums over the rows whose first id of `feature` is `id`. `loss` is in nats."""

    feature: str
    id: int
    rows: int  # not weighted
    weight: float
    weight_squares: float
    labels: float
    predictions: float
    loss: float

    @property
    def ne(self) -> float:
        """Return the loss divided by the entropy of the slice's label rate; NaN if its labels are
        all equal.
        """
        rate = self.label_rate
        return self.loss / self.weight / binary_entropy(rate) if 0.0 < rate < 1.0 else math.nan

    @property
    def effective_rows(self) -> float:
        """Return the number of rows of equal weight that would give the same error (Kish 1965)."""
        return self.weight**2 / self.weight_squares

    @property
    def label_rate(self) -> float:
        return self.labels / self.weight

    @property
    def mean_prediction(self) -> float:
        return self.predictions / self.weight

    @property
    def calibration(self) -> float:
        return self.predictions / self.labels if self.labels else float("nan")


@dataclass(frozen=True)
class Blocks:
    """Weighted sums over the rows of each block [num_blocks]; `rows` is not weighted; `auc_term`
    sums each row's contribution to the AUC's deviation. If block b is sampled m_b times, the AUC
    is to first order the AUC of the complete split plus sum(m_b * auc_term_b) (DeLong 1988).
    """

    rows: Floats
    weight: Floats
    labels: Floats
    predictions: Floats
    loss: Floats
    auc_term: Floats


COLUMNS = tuple(each.name for each in fields(Blocks))


@dataclass(frozen=True)
class EvaluationStats:
    """The statistics of an evaluation, for one binary label. `label` is empty if the run has only
    one label. `others` has the statistics of further labels.
    """

    split: str
    step: int
    dataset: str  # fingerprint
    metrics: dict[str, float]
    blocks: Blocks
    reliability: list[Bin] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    label: str = ""
    others: tuple[EvaluationStats, ...] = ()

    @property
    def auc(self) -> float:
        return self.metrics.get(f"{self.label}/auc" if self.label else "auc", math.nan)

    def of_label(self, label: str) -> EvaluationStats | None:
        """Return the statistics of a label; None if there are none, as for a regression."""
        return next((each for each in (self, *self.others) if each.label in ("", label)), None)

    def write(self, evaluation: str) -> None:
        """Write the statistics to a file next to `evaluation`, the JSON file of the metrics."""
        write_stats(stats_path(evaluation), self)

    def lines(self) -> list[str]:
        """Return nothing: the page shows the statistics."""
        return []


def summarize_rows(
    blocks: NDArray[np.integer],
    logits: NDArray[np.floating],
    labels: NDArray[np.integer],
    num_blocks: int,
    weights: NDArray[np.floating],
) -> tuple[Blocks, list[Bin]]:
    """Return the Blocks of rows in any order. Arguments are [n]: blocks in [0, num_blocks), logits,
    labels 0 or 1, and weights.
    """
    order = np.argsort(logits, kind="stable")
    ordered = logits[order]
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, len(ordered))
    del ordered
    tie_of = np.repeat(np.arange(len(ends), dtype=np.int32), np.diff(ends, prepend=0))  # rows of `order`

    def per_block(values: NDArray[np.floating] | None) -> Floats:
        return np.bincount(blocks, weights=values, minlength=num_blocks).astype(np.float64)

    # One column of float64 after the other, because with 2**24 rows each takes 128 MiB.
    auc_term = per_block(auc_terms(labels, weights, order, tie_of))
    bin_of = np.empty(len(order), np.int8)
    bin_of[order] = _bins_of_ties(np.bincount(tie_of, weights[order]))[tie_of]
    del order, tie_of
    loss = per_block(weights * log_losses(logits, labels.astype(np.float64)))
    columns = [weights, weights * labels, weights * probabilities(logits)]
    weight, clicks, predicted = (np.bincount(bin_of, column) for column in columns)
    rows = np.bincount(bin_of)
    bins = [
        Bin(int(rows[number]), float(predicted[number] / weight[number]), float(clicks[number] / weight[number]))
        for number in np.flatnonzero(rows)
    ]
    blocks_of = [per_block(column) for column in columns]
    return Blocks(per_block(None), blocks_of[0], blocks_of[1], blocks_of[2], loss, auc_term), bins


def _bins_of_ties(weights: NDArray[np.number]) -> NDArray[np.int8]:
    """Return the bin of each group of equal scores, lowest score first. All bins have about the same weight."""
    middle = np.cumsum(weights) - weights / 2
    return np.minimum(middle / weights.sum() * NUM_BINS, NUM_BINS - 1).astype(np.int8)


def auc_terms(
    labels: NDArray[np.integer],
    weights: NDArray[np.floating],
    order: NDArray[np.integer],
    tie_of: NDArray[np.integer],
) -> Floats:
    """Return [n]: each row's structural component of the AUC minus the mean of its class (DeLong et
    al. 1988), times its weight.

    `order` sorts the rows by score, ascending. `tie_of` numbers the scores of the sorted rows;
    equal scores have equal numbers. The result is 0 if all labels are equal.
    """
    positive, ordered = labels[order] > 0, weights[order].astype(np.float64)
    of_positives, of_negatives = float(ordered[positive].sum()), float(ordered[~positive].sum())
    terms = np.zeros(len(order))
    if not of_positives or not of_negatives:
        return terms

    def shares_below(of_class: NDArray[np.bool_], total: float, rows: NDArray[np.bool_]) -> Floats:
        """Return for `rows` the share of a class that has a lower score. Rows with an equal score count half."""
        per_tie = np.bincount(tie_of, ordered * of_class)
        below = np.cumsum(per_tie) - per_tie / 2
        below /= total
        shares: Floats = below[tie_of[rows]]
        return shares

    above_negatives = shares_below(~positive, of_negatives, positive)
    area = float(np.average(above_negatives, weights=ordered[positive]))
    terms[order[positive]] = (above_negatives - area) * ordered[positive] / of_positives
    del above_negatives
    below_positives = 1.0 - shares_below(positive, of_positives, ~positive)
    terms[order[~positive]] = (below_positives - area) * ordered[~positive] / of_negatives
    return terms


def stats_path(evaluation: str) -> str:
    """Return the path of the statistics next to the JSON file of an evaluation."""
    return evaluation.removesuffix(".json") + SUFFIX


def write_stats(path: str, stats: EvaluationStats) -> None:
    """Write the file completely, or do not write it at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {
        "split": stats.split,
        "step": stats.step,
        "dataset": stats.dataset,
        "metrics": {name: value for name, value in stats.metrics.items() if np.isfinite(value)},
        **_lists(stats),
        "others": [_lists(each) for each in stats.others],
    }
    columns = {name: getattr(stats.blocks, name) for name in COLUMNS}
    for each in stats.others:
        columns |= {f"{each.label}/{name}": getattr(each.blocks, name) for name in COLUMNS}
    table = pa.table(columns)
    buffer = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps(about).encode()}), buffer, compression="zstd")
    storage.publish_bytes(path, buffer.getvalue().to_pybytes())


def _lists(stats: EvaluationStats) -> dict[str, Any]:
    return {
        "label": stats.label,
        "reliability": [list(astuple(each)) for each in stats.reliability],
        "slices": [list(astuple(each)) for each in stats.slices],
    }


def list_stats(run: str) -> dict[tuple[str, int], str]:
    """Return (split, step) -> statistics file, for evaluations of complete splits, ascending."""
    found = {}
    for name in storage.list_folder(run):
        if match := NAME.fullmatch(name):
            found[match[1], int(match[2])] = storage.join(run, name)
    return dict(sorted(found.items()))


def keep_stats(run: str, stats: EvaluationStats, metric: str) -> None:
    """Write the statistics of a training's evaluation.

    Of the training's earlier statistics keep only the best by `metric`. Statistics that `evaluate`
    has written are kept.
    """
    path = stats_path(storage.join(run, f"evaluation.{stats.split}.step_{stats.step}.json"))
    write_stats(path, stats)
    sign = -1.0 if is_higher_better(metric) else 1.0
    earlier = {}
    for (split, _), other in list_stats(run).items():
        if split == stats.split and not storage.exists(other.removesuffix(SUFFIX) + ".json"):
            try:
                earlier[other] = sign * _about(other)["metrics"][metric]
            except (DamagedError, KeyError):
                earlier[other] = float("inf")
    best = min(earlier, key=lambda each: earlier[each], default=path)
    for other in earlier.keys() - {best, path}:
        storage.remove(other)


def _about(path: str) -> Any:
    """Read the metadata. Raises DamagedError as read_stats does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with storage.open_file(path, "rb") as file:
            return json.loads(pq.read_metadata(file).metadata[KEY])
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read ({error})") from None


def _read_label(about: Any, lists: Any, table: Any, prefix: str) -> EvaluationStats:
    blocks = Blocks(**{name: table[prefix + name].to_numpy() for name in COLUMNS})
    metrics: dict[str, float] = about["metrics"]
    # files of earlier releases have the main label only, without its name
    first = next((name.rpartition("/")[0] for name in metrics if "/" in name), "")
    reliability, slices = [Bin(*each) for each in lists["reliability"]], [Slice(*each) for each in lists["slices"]]
    return EvaluationStats(
        about["split"], about["step"], about["dataset"], metrics, blocks, reliability, slices, lists.get("label", first)
    )


def read_stats(path: str) -> EvaluationStats:
    """Read statistics. Raises DamagedError for a file that write_stats did not write."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with storage.open_file(path, "rb") as file:
            table = pq.read_table(pa.BufferReader(file.read()))
        about = json.loads(table.schema.metadata[KEY])
        others = tuple(_read_label(about, each, table, f"{each['label']}/") for each in about.get("others", ()))
        return replace(_read_label(about, about, table, ""), others=others)
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read ({error}); evaluate the run again to write it") from None
