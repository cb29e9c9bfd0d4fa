"""Schemas of labels: what a data set's rows are asked to teach, and how negatives of the training rows are sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within, did_you_mean

LABEL_KINDS = ("binary", "regression", "ordinal")
MAX_BUCKETS = 1000
# Of each kind, what early stopping and checkpoints can go by.
LABEL_METRICS = {"binary": ("ne", "auc", "logloss"), "regression": ("mse", "mae", "r2"), "ordinal": ("ne", "mae")}


@dataclass
class LabelConfig:
    """One label, a column of the source.

    kind: binary is 0 or 1; regression any number; ordinal the number of a bucket, 0 to num_buckets - 1, the order of
        which means something.
    weight: what its loss is multiplied by in the sum over all labels; a setting of training, data are not prepared anew.
    values: the number of each text of the column, {yes: 1, no: 0}; of a binary or ordinal label that is no number there.
    threshold: of a binary label, 1 where the column's number is at least this, else 0.
    mask: a binary label. Rows where it is 0 do not count for this one, whose value may be missing there.
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
            raise ConfigError(f"labels.num_buckets={self.num_buckets} goes with kind=ordinal, not kind={self.kind}")
        if self.kind == "ordinal":
            if self.num_buckets is None:
                raise ConfigError("labels.kind=ordinal needs num_buckets=<how many buckets there are>")
            check_within("labels.num_buckets", self.num_buckets, 2, MAX_BUCKETS)

    def _check_cells(self) -> None:
        if self.values and self.threshold is not None:
            raise ConfigError(
                f"labels.values and labels.threshold={self.threshold:g} both say what is 1: leave one of them out"
            )
        if self.threshold is not None and (self.kind != "binary" or not math.isfinite(self.threshold)):
            raise ConfigError(
                f"labels.threshold={self.threshold} is a number, and makes a label of kind=binary, not {self.kind}"
            )
        if not self.values:
            return
        if self.kind == "regression":
            raise ConfigError(
                "labels.values goes with kind=binary or ordinal, not regression, whose column holds numbers"
            )
        least, most = 0, 1 if self.kind == "binary" else (self.num_buckets or 1) - 1
        for text, number in self.values.items():
            if not least <= number <= most:
                raise ConfigError(
                    f"labels.values: {text!r} is {number}; a label of kind={self.kind} is {least} to {most}"
                )
        if len(set(self.values.values())) == 1:
            (number,) = set(self.values.values())
            raise ConfigError(
                f"labels.values names {number} alone: give the texts of other values too, {{yes: 1, no: 0}}"
            )


@dataclass
class NegativeSamplingConfig:
    """Which training rows are left out: of those where the binary label `label` is 0, all but a share `keep`, by a seeded hash.

    Validation and test rows stay. Predictions are of all rows: log(keep) is added to the trained logit of `label`
    (He et al. 2014, section 6.3), and for other labels a negative that was kept counts 1 / keep times.
    """

    label: str = "click"
    keep: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_within("negative_sampling.keep", self.keep, 0.0001, 1.0)
        check_at_least("negative_sampling.seed", self.seed, 0)


def check_labels(labels: Mapping[str, LabelConfig]) -> None:
    """Raises ConfigError where a mask is no binary label, or masks go round in a circle."""
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
            what = f"of kind {mask.kind}" if mask.kind != "binary" else f"masked itself, by {mask.mask!r}"
            raise ConfigError(f"{key}={label.mask!r} is {what}: name a binary label that all rows have")
