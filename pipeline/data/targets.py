"""Find the labels that a job learns, their weights, and the rows in which they count (stdlib only)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.columns import ColumnsConfig
from pipeline.data.dataset import Dataset, listed_labels
from pipeline.runtime.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Target:
    """A label that a model learns.

    weight: the weight of its loss in the sum. mask: a label that is 1 in the rows that count.
    train_offset: a number added to its logits in training only, because training rows were sampled:
    log(1 / keep). loss: of a regression label, a function (outputs, labels) -> losses, [rows] each;
    None: squared error. label, value: this target is one class of a label; the targets of its other
    classes come before and after it.
    """

    name: str
    kind: str = "binary"
    num_buckets: int | None = None
    weight: float = 1.0
    mask: str | None = None
    train_offset: float = 0.0
    loss: Any = None
    label: str | None = None
    value: int | None = None

    @property
    def width(self) -> int:
        """Return how many numbers a model outputs for this label: one logit or value, a logit per
        class, or for an ordinal label a logit per bucket except the first.
        """
        return 1 if self.num_buckets is None else self.num_buckets - (self.kind == "ordinal")

    @property
    def classes(self) -> list[Target]:
        """Return a binary target for each class of a label of classes, otherwise the target itself."""
        if self.kind != "classes":
            return [self]
        binary = replace(self, kind="binary", num_buckets=None, label=self.name)
        return [replace(binary, name=f"{self.name}_{value}", value=value) for value in range(self.width)]


def heads_of(targets: Sequence[Target]) -> list[Target]:
    """Join the targets of one label's classes, the inverse of Target.classes."""
    counts = Counter(target.label for target in targets)
    heads = {target.label or target.name: target for target in targets}
    return [
        replace(head, name=name, kind="classes", num_buckets=counts[name], label=None, value=None)
        if head.label
        else head
        for name, head in heads.items()
    ]


def targets_of(columns: ColumnsConfig, dataset: Dataset, learns_all: bool) -> list[Target]:
    """Return the main label, which data.columns.label may change. If the model learns all labels,
    also return the other labels. A label of classes gives a target for each class.

    Raises:
        DataError: the data set lacks a label of data.columns, or has it with other settings.
    """
    held = {label.name: label for label in dataset.all_labels}
    if dataset.labels or columns.labels:
        for label in listed_labels(columns.labels):
            if held.get(label.name) != label:
                raise DataError(
                    f"data.columns.labels.{label.name} is {_describe(label)}, data set {dataset.name!r} was prepared with "
                    f"{_describe(held.get(label.name))}{did_you_mean(label.name, held)}: prepare it again, in another data.path"
                )
    if columns.weight is not None and columns.weight != dataset.weight_column:
        raise DataError(
            f"data.columns.weight={columns.weight!r}, but data set {dataset.name!r} was prepared with "
            f"{dataset.weight_column!r}: prepare it again with it, in another data.path"
        )
    main = main_label(columns, dataset)
    held = {name: label for name, label in held.items() if name not in columns.logged}
    if learns_all and dataset.labels and set(columns.learnable) != set(held):
        raise DataError(
            f"the model learns all {len(held)} labels of data set {dataset.name!r}, but data.columns.labels lists "
            f"{', '.join(columns.labels) or 'none'}: list {', '.join(held)}"
        )
    names = [main, *(name for name in held if name != main)] if learns_all else [main]
    sampling = dataset.negative_sampling
    offsets = {sampling["label"]: -math.log(sampling["keep"])} if sampling else {}
    targets = [
        Target(
            name,
            held[name].kind,
            held[name].num_buckets,
            columns.labels[name].weight if name in columns.labels else 1.0,
            held[name].mask,
            offsets.get(name, 0.0),
            columns.labels[name].read_loss() if name in columns.labels else None,
        )
        for name in names
    ]
    return [each for target in targets for each in target.classes]


def main_label(columns: ColumnsConfig, dataset: Dataset) -> str:
    """Return the label that decides wherever one label decides: data.columns.label.

    Raises:
        DataError: the data set has several labels, and not this label.
    """
    names = [label.name for label in dataset.all_labels]
    if columns.label in names:
        return columns.label
    if dataset.labels and columns.label != ColumnsConfig().label:
        raise DataError(
            f"data.columns.label={columns.label!r} is not a label of data set {dataset.name!r}{did_you_mean(columns.label, names)}: "
            f"it has {', '.join(names)}"
        )
    return dataset.label


def _describe(label: object) -> str:
    if label is None:
        return "no such label"
    return ", ".join(f"{name}={value}" for name, value in vars(label).items() if name != "name" and value is not None)
