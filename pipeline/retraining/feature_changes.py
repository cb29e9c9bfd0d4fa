"""Compare what a champion reads with what a job reads: features and labels, kept, added and removed.

A champion reads its own columns from the rows of a window, and a challenger reads the columns of
the job. Both data sets check the columns of both models, so both have the same rows. A column that
only the champion reads, and that the source no longer has, is missing in each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.config.columns import ColumnsConfig, LabelConfig
from pipeline.config.data import DataConfig, SplitConfig
from pipeline.config.jobs.retrain import RetrainJob
from pipeline.config.jobs.train import TrainJob
from pipeline.config.retraining import GateConfig
from pipeline.data.dataset import Dataset
from pipeline.data.raw.layout import columns_of, find_format, source_columns
from pipeline.runtime.errors import RetrainingError

# How a model reads columns. The other settings of data.* say how the files of today are written.
OF_THE_MODEL = ("columns", "dense_transform", "dense_transforms", "ids", "feature_ids", "buckets", "transforms")
DENSE, CATEGORY, LIST, SEQUENCE = "dense", "categorical", "multi-hot", "sequence"


class LacksColumnError(RetrainingError):
    """A window lacks a column that the job adds, so the job does not fit the window."""


@dataclass(frozen=True)
class FeatureChanges:
    """Features with their kinds, and labels. A feature of another kind is both added and removed."""

    kept: dict[str, str]
    added: dict[str, str]
    removed: dict[str, str]
    kept_labels: list[str]
    added_labels: list[str]
    removed_labels: list[str]

    @property
    def is_empty(self) -> bool:
        return not (self.added or self.removed or self.added_labels or self.removed_labels)

    def as_dict(self) -> dict[str, list[str]]:
        """Return what a record stores: the lists that are not empty."""
        found = {
            "added": [*self.added],
            "removed": [*self.removed],
            "added_labels": self.added_labels,
            "removed_labels": self.removed_labels,
        }
        return {name: names for name, names in found.items() if names}

    def lines(self, before: Dataset, now: Dataset) -> list[str]:
        """Return three lines: the features and labels that are kept, initialized and dropped.

        Numbers of rows are those of `before`, or of `now` for the initialized features.
        """
        num_kept = {
            kind: sum(each == kind for each in self.kept.values()) for kind in (DENSE, CATEGORY, LIST, SEQUENCE)
        }
        kinds = ", ".join(f"{count} {kind}" for kind, count in num_kept.items() if count) or "none"
        rows = sum(feature.cardinality for feature in before.sparse_features if feature.name in self.kept)
        return [
            f"kept         {len(self.kept)} features ({kinds}; {rows:,} rows of tables), {_labels(self.kept_labels)}",
            f"initialized  {_listed(self.added, now, self.added_labels)}",
            f"dropped      {_listed(self.removed, before, self.removed_labels)}",
        ]


def _labels(names: list[str]) -> str:
    return f"{len(names)} label{'s' * (len(names) != 1)}{' (' * bool(names)}{', '.join(names)}{')' * bool(names)}"


def _listed(features: Mapping[str, str], dataset: Dataset, labels: list[str]) -> str:
    rows = {feature.name: f", {feature.cardinality:,} rows" for feature in dataset.sparse_features}
    names = ", ".join(f"{name} ({kind}{rows.get(name, '')})" for name, kind in features.items())
    return f"{len(features)} features{': ' * bool(names)}{names}; {_labels(labels)}"


def compare(champion: TrainJob, job: TrainJob) -> FeatureChanges:
    """Return how the features and labels of `job` differ from those of the champion's job."""
    before, now = features_read(champion.data), features_read(job.data)
    labels_before, labels_now = learnt_labels(champion), learnt_labels(job)
    return FeatureChanges(
        {name: kind for name, kind in now.items() if before.get(name) == kind},
        {name: kind for name, kind in now.items() if before.get(name) != kind},
        {name: kind for name, kind in before.items() if now.get(name) != kind},
        [name for name in labels_now if name in labels_before],
        [name for name in labels_now if name not in labels_before],
        [name for name in labels_before if name not in labels_now],
    )


def features_read(data: DataConfig) -> dict[str, str]:
    """Return feature -> kind."""
    columns = columns_of(data)
    kinds = {name: CATEGORY if name in data.buckets else DENSE for name in columns.dense}
    kinds |= dict.fromkeys(columns.sparse, CATEGORY) | dict.fromkeys(columns.multi_hot, LIST)
    return kinds | dict.fromkeys(columns.sequence, SEQUENCE)


def learnt_labels(job: TrainJob) -> list[str]:
    """Return the labels that the model learns, the main label first."""
    columns = columns_of(job.data)
    others = [name for name in columns.learnable if name != columns.label]
    return [columns.label, *(others if job.model.learns_all else [])]


def dense_policy(job: RetrainJob, champion: TrainJob) -> str:
    """Return warm_start.dense: growth.dense, and `matching` for changed features, which are inputs of layers."""
    is_same = job.growth.dense != "load" or compare(champion, job).is_empty
    return job.growth.dense if is_same else "matching"


def comparable_gate(gate: GateConfig, champion: TrainJob, job: TrainJob) -> GateConfig | None:
    """Return the gate for what both models learn and read; None if the champion does not learn the gate's label."""
    task, learnt, known = gate.task or columns_of(job.data).label, learnt_labels(champion), features_read(champion.data)
    if task not in learnt:
        return None
    held = {name: limit for name, limit in gate.held.items() if name in learnt}
    dropped = features_read(job.data).keys() - known.keys()
    slices = {name: limit for name, limit in gate.slices.items() if name not in dropped}
    policy, added = dict(gate.policy), features_read(job.data).keys() - known.keys()
    if policy.get("action"):
        policy["action"] = [name for name in policy["action"] if name not in added]
    return replace(gate, task=task, held=held, slices=slices, policy=policy)


def view(reader: DataConfig, other: DataConfig, today: DataConfig) -> tuple[DataConfig, dict[str, str | None]]:
    """Return the data config of rows that `reader` reads and `other` checks, in files as `today` says.

    Also return the columns of `reader` that no longer belong to the job `today`, with the values of
    a row that lacks them.
    """
    settings = {name: getattr(reader, name) for name in OF_THE_MODEL}
    # These settings name columns of the job, and play no part in what a model reads.
    settings |= {"synthetic": None, "generator": {}, "split": SplitConfig("row_range", 0.0, 0.0)}
    if find_format(today.format).columns is not None:
        return replace(today, **settings), {}
    own, wanted, columns = source_columns(reader), source_columns(other), reader.columns
    taken = {*_names(own), *reader.transforms, today.columns.weight, today.group_column}
    every_label = {**wanted.all_labels, **own.all_labels}
    if labels := {name: label for name, label in wanted.all_labels.items() if name not in taken}:
        columns = replace(columns, labels={**own.all_labels, **labels}, label_values={}, label_threshold=None)
    columns = replace(
        columns,
        weight=today.columns.weight,
        dense=[*columns.dense, *_new(wanted.dense, taken)],
        sparse=[*columns.sparse, *_new(wanted.sparse, taken)],
        multi_hot=[*columns.multi_hot, *_new(wanted.lists, taken)],
        weighted=[*columns.weighted, *_new(wanted.weighted, taken)],
        vectors={**columns.vectors, **{name: wanted.vectors[name] for name in _new(wanted.vectors, taken)}},
    )
    gone = sorted({*_names(own), *_names(wanted)} - {*_names(source_columns(today)), *today.transforms})
    absent = {name: _a_label(every_label[name]) if name in every_label else None for name in gone}
    return replace(today, **settings | {"columns": columns}), absent


def source_names(data: DataConfig) -> list[str]:
    """Return the columns of the source that the config reads."""
    return [name for name in _names(source_columns(data)) if name not in data.joined_columns]


def _names(columns: ColumnsConfig) -> list[str]:
    return [*columns.all_labels, *columns.dense, *columns.sparse, *columns.raw_lists]


def _new(names: Iterable[str], taken: set[str | None]) -> list[str]:
    return [name for name in names if name not in taken]


def _a_label(label: LabelConfig) -> str:
    """Return a valid cell of the label."""
    return next(iter(label.values), "0")


def only_read(dataset: Dataset, data: DataConfig) -> Dataset:
    """Return the data set with the features and labels of a model's config only."""
    known = features_read(data)
    declared = columns_of(data).labels
    return replace(
        dataset,
        label=columns_of(data).label,
        dense_features=[name for name in dataset.dense_features if name in known],
        sparse_features=[feature for feature in dataset.sparse_features if feature.name in known],
        dense_columns={name: about for name, about in dataset.dense_columns.items() if name in known},
        labels=[label for label in dataset.labels if label.name in declared],
    )
