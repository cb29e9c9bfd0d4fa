"""Define labels, and the sampling of negative training rows (stdlib only)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within, did_you_mean

LABEL_KINDS = ("binary", "regression", "ordinal")
MAX_BUCKETS = 1000
# The metrics of each kind that early stopping and checkpoints can use.
LABEL_METRICS = {"binary": ("ne", "auc", "logloss"), "regression": ("mse", "mae", "r2"), "ordinal": ("ne", "mae")}


@dataclass
class LabelConfig:
    """One label, a column of the source.

    kind: binary is 0 or 1; regression is any number; ordinal is a bucket number from 0 to num_buckets - 1
        whose order has a meaning.
    weight: factor of the label's loss in the sum over all labels. Only training uses it.
    values: text -> number, {yes: 1, no: 0}, for a binary or ordinal label whose column holds text.
    threshold: for a binary label; it is 1 if the column's number is at least the threshold, otherwise 0.
    mask: a binary label. Rows where the mask is 0 do not count for this label; its value may be missing.
    """

    kind: str = "binary"
    num_buckets: int | None = None
    weight: float = 1.0
    mask: str | None = None
    values: dict[str, int] = field(default_factory=dict)
    threshold: float | None = None

    def __post_init__(self) -> None:
        check_choice("labels.kind", self.kind, LABEL_KINDS)
        self._check_cells()
        check_above("labels.weight", self.weight, 0.0)
        if self.kind != "ordinal" and self.num_buckets is not None:
            raise ConfigError(f"labels.num_buckets={self.num_buckets} needs kind=ordinal, not kind={self.kind}")
        if self.kind == "ordinal":
            if self.num_buckets is None:
                raise ConfigError("labels.kind=ordinal needs num_buckets=<the number of buckets>")
            check_within("labels.num_buckets", self.num_buckets, 2, MAX_BUCKETS)

    def _check_cells(self) -> None:
        if self.values and self.threshold is not None:
            raise ConfigError(
                f"labels.values and labels.threshold={self.threshold:g} both define the value 1: leave one of them out"
            )
        if self.threshold is not None and (self.kind != "binary" or not math.isfinite(self.threshold)):
            raise ConfigError(
                f"labels.threshold={self.threshold} must be a finite number of a label of kind=binary, not {self.kind}"
            )
        if not self.values:
            return
        if self.kind == "regression":
            raise ConfigError("labels.values needs kind=binary or ordinal; a regression column holds numbers")
        lowest, highest = 0, 1 if self.kind == "binary" else (self.num_buckets or 1) - 1
        for text, number in self.values.items():
            if not lowest <= number <= highest:
                raise ConfigError(
                    f"labels.values: {text!r} is {number}; a label of kind={self.kind} is {lowest} to {highest}"
                )
        if len(set(self.values.values())) == 1:
            (number,) = set(self.values.values())
            raise ConfigError(
                f"labels.values names only {number}: give the texts of other values too, {{yes: 1, no: 0}}"
            )


@dataclass
class NegativeSamplingConfig:
    """Drop negative training rows: a share `keep` of the rows with `label`=0 stays, chosen by a
    seeded hash.

    Validation and test rows are not sampled. Predictions are for all rows: log(keep) is added to
    the trained logit of `label` (He et al. 2014, section 6.3). For other labels a kept negative
    counts 1 / keep times.
    """

    label: str = "click"
    keep: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_within("negative_sampling.keep", self.keep, 0.0001, 1.0)
        check_at_least("negative_sampling.seed", self.seed, 0)


def check_labels(labels: Mapping[str, LabelConfig]) -> None:
    """Raise ConfigError if a mask is not a binary label, or masks depend on each other in a circle."""
    for name, label in labels.items():
        if label.mask is None:
            continue
        key = f"data.columns.labels.{name}.mask"
        if label.mask not in labels or label.mask == name:
            raise ConfigError(
                f"{key}={label.mask!r} is not another label{did_you_mean(label.mask, labels)}; there are {', '.join(labels)}"
            )
        mask = labels[label.mask]
        if mask.kind != "binary" or mask.mask is not None:
            what = f"of kind {mask.kind}" if mask.kind != "binary" else f"itself masked by {mask.mask!r}"
            raise ConfigError(f"{key}={label.mask!r} is {what}: name a binary label that all rows have")
