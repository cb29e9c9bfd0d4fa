"""Declare the columns of a source: features, sequences, labels (stdlib only)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.config.registry import find, read_settings
from pipeline.runtime.errors import (
    ConfigError,
    check_above,
    check_at_least,
    check_choice,
    check_within,
    did_you_mean,
)

LABEL_KINDS = ("binary", "regression", "ordinal", "classes")
COUNTED_KINDS = ("ordinal", "classes")  # labels with num_buckets
MAX_BUCKETS = 1000
# The metrics of each kind that early stopping and checkpoints can use.
LABEL_METRICS = {"binary": ("ne", "auc", "logloss"), "regression": ("mse", "mae", "r2"), "ordinal": ("ne", "mae")}


@dataclass
class LabelConfig:
    """One label, a column of the source.

    kind: binary is 0 or 1; regression is any number; ordinal is a bucket number from 0 to num_buckets - 1
        whose order has a meaning; classes is a number from 0 to num_buckets - 1 whose order has no meaning.
    weight: factor of the label's loss in the sum over all labels. Only training uses it.
    values: text -> number, {yes: 1, no: 0}, for a binary or ordinal label whose column holds text.
    threshold: for a binary label; it is 1 if the column's number is at least the threshold, otherwise 0.
    loss: the loss of a regression label: the kind and settings of a registered "loss". {}: squared error. Only
        training uses it.
    mask: a binary label. Rows where the mask is 0 do not count for this label; its value may be missing.
    """

    kind: str = "binary"
    num_buckets: int | None = None
    weight: float = 1.0
    mask: str | None = None
    values: dict[str, int] = field(default_factory=dict)
    threshold: float | None = None
    loss: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("labels.kind", self.kind, LABEL_KINDS)
        self.read_loss()
        self._check_cells()
        check_above("labels.weight", self.weight, 0.0)
        if self.kind not in COUNTED_KINDS and self.num_buckets is not None:
            raise ConfigError(
                f"labels.num_buckets={self.num_buckets} needs kind=ordinal or kind=classes, not kind={self.kind}"
            )
        if self.kind in COUNTED_KINDS:
            if self.num_buckets is None:
                raise ConfigError(f"labels.kind={self.kind} needs num_buckets=<how many there are>")
            check_within("labels.num_buckets", self.num_buckets, 2, MAX_BUCKETS)

    def read_loss(self) -> Callable[..., Any] | None:
        """Return `loss` as the dataclass of its kind: a function of outputs and labels, which
        returns the losses; [rows] each. None: squared error. Raises ConfigError for unknown settings."""
        if not self.loss:
            return None
        if self.kind != "regression":
            raise ConfigError(f"labels.loss={self.loss} needs kind=regression, not kind={self.kind}")
        settings = {name: value for name, value in self.loss.items() if name != "kind"}
        kind = str(self.loss.get("kind", ""))
        return read_settings(find("loss", kind, "labels.loss.kind"), settings, "labels.loss", f"kind={kind}")

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


def learnt_labels(labels: Mapping[str, LabelConfig]) -> dict[str, LabelConfig]:
    """Return labels as a model learns and measures them: each class as a binary label, <label>_<class>."""
    found: dict[str, LabelConfig] = {}
    for name, label in labels.items():
        classes = range(label.num_buckets or 0) if label.kind == "classes" else ()
        found |= {f"{name}_{value}": LabelConfig(mask=label.mask) for value in classes} or {name: label}
    return found


def check_labels(labels: Mapping[str, LabelConfig]) -> None:
    """Raise ConfigError if a mask is not a binary label, masks depend on each other in a circle, or
    a class has the name of a label."""
    for name, label in labels.items():
        if taken := [each for each in learnt_labels({name: label}) if each != name and each in labels]:
            raise ConfigError(f"data.columns.labels: {taken[0]!r} is a label and a class of {name!r}: rename one")
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


KEEPS = ("last", "first")
MAX_VECTOR = 4096  # numbers, each of which is a column of the shards
MAX_LENGTH = 10_000  # positions; the lookup treats each position as a feature


@dataclass
class SequenceConfig:
    """A list whose order counts, oldest first: for example the earlier actions of a user.

    max_length: `prepare` and serving cut longer lists. keep: whether the last (newest) or the first
    ids stay. shares: the feature whose ids and table it shares; values of both are counted
    together. beside: the sequence that this one describes position by position; both have the same
    length and are cut equally.
    """

    max_length: int | None = None
    keep: str | None = None
    shares: str | None = None
    beside: str | None = None

    def __post_init__(self) -> None:
        check_at_least("data.columns.sequence.<name>.max_length", self.max_length, 1, allow_none=True)
        if (self.max_length or 0) > MAX_LENGTH:
            raise ConfigError(
                f"data.columns.sequence.<name>.max_length={self.max_length} is more than {MAX_LENGTH} positions, each of "
                "which needs its own lookup; cut the sequence to what a model reads"
            )
        if self.keep is not None:
            check_choice("data.columns.sequence.<name>.keep", self.keep, KEEPS)


def resolve_sequences(sequences: Mapping[str, SequenceConfig], features: Iterable[str]) -> dict[str, SequenceConfig]:
    """Fill in default lengths and sides. `features` are the columns with one value per row, whose
    ids may be shared. Raises ConfigError if a sequence has no length, or its `shares` or `beside`
    names a wrong column."""
    known = list(features)
    found = {}
    for name, sequence in sequences.items():
        key = f"data.columns.sequence.{name}"
        if sequence.shares is not None and sequence.shares not in known:
            raise ConfigError(
                f"{key}.shares={sequence.shares!r} is not a column of data.columns.sparse"
                f"{did_you_mean(sequence.shares, known)}; name the feature whose ids it shares, or leave it out"
            )
        if sequence.beside is None:
            if sequence.max_length is None:
                raise ConfigError(f"{key} needs max_length=<ids>, or beside=<the sequence that it describes>")
            found[name] = replace(sequence, keep=sequence.keep or "last")
            continue
        leader = sequences.get(sequence.beside)
        if leader is None or leader.beside is not None or sequence.beside == name:
            leaders = [other for other, each in sequences.items() if each.beside is None]
            raise ConfigError(
                f"{key}.beside={sequence.beside!r} is not a sequence with its own length{did_you_mean(sequence.beside, leaders)}; "
                f"name one of {', '.join(leaders) or 'those with a max_length'}"
            )
        if (sequence.max_length, sequence.keep) != (None, None):
            raise ConfigError(f"{key} is cut like {sequence.beside}: leave out its max_length and keep")
        found[name] = replace(sequence, max_length=leader.max_length, keep=leader.keep or "last")
    return found


@dataclass
class ColumnsConfig:
    """Names of the source's columns. Criteo's format has fixed names (label, int_0..12, cat_0..25).

    A column of lists (Parquet list, or text joined by `list_separator`) belongs to `multi_hot`, or to
    `sequence` if the order counts (config.sequences). Every other categorical column belongs to `sparse`.
    `cat_{0..25}` in a list means cat_0 to cat_25. `timestamp` (whole numbers or ISO 8601) is read if
    data.split.kind is time or date. Missing values are empty text, each word of `null_values`, and NaN in
    dense columns. list_separator=json: lists are JSON, [1, 2] or ["a", "b"]. `weighted` names multi_hot
    columns whose elements are id:weight, split at the last colon; an element without a weight counts 1.

    A single label is binary and needs no entry in `labels`; `label_values` and `label_threshold`
    belong to it. If there are several labels, `label` names the main one, which a model of one task
    learns and the gate compares; by default it is the first binary label. `weight` is a column of
    numbers >= 0 that multiply a row's losses and metrics. `vectors` are columns with lists of so many
    numbers, each of which becomes a dense feature; a further feature is 1 if the vector is missing.

    `propensity` is the probability with which the logging policy showed the row's action in its
    context, 0 for a candidate that was not shown. `position` is the place of the row. Both become
    labels of kind regression that no model learns.
    """

    label: str = "label"
    labels: dict[str, LabelConfig] = field(default_factory=dict)
    label_values: dict[str, int] = field(default_factory=dict)
    label_threshold: float | None = None
    weight: str | None = None
    propensity: str | None = None
    position: str | None = None
    dense: list[str] = field(default_factory=list)
    sparse: list[str] = field(default_factory=list)
    multi_hot: list[str] = field(default_factory=list)
    sequence: dict[str, SequenceConfig] = field(default_factory=dict)
    timestamp: str | None = None
    list_separator: str = "|"
    null_values: list[str] = field(default_factory=list)
    weighted: list[str] = field(default_factory=list)
    vectors: dict[str, int] = field(default_factory=dict)  # column -> width

    def __post_init__(self) -> None:
        if not self.list_separator:  # a blank may separate
            raise ConfigError("data.columns.list_separator is empty: give it a value")
        self.dense, self.sparse, self.multi_hot = map(expand_ranges, (self.dense, self.sparse, self.multi_hot))
        self._check_weighted()
        for name, width in self.vectors.items():
            check_within(f"data.columns.vectors.{name}", width, 1, MAX_VECTOR)
        resolve_sequences(self.sequence, self.sparse)  # checks them
        self._add_logged()
        if not self.labels:
            LabelConfig(values=self.label_values, threshold=self.label_threshold)  # checks them
            return
        if self.label_values or self.label_threshold is not None:
            key = "values" if self.label_values else "threshold"
            raise ConfigError(
                f"data.columns.label_{key} is for a single label, but data.columns.labels lists {len(self.labels)}: "
                f"set data.columns.labels.<name>.{key}"
            )
        check_labels(self.labels)
        if self.label == "label" and self.label not in self.labels:
            binary = (name for name, label in self.labels.items() if label.kind == "binary")
            self.label = next(binary, next(iter(self.labels)))
        elif self.label and self.label not in self.labels:
            raise ConfigError(
                f"data.columns.label={self.label!r} is not in data.columns.labels{did_you_mean(self.label, self.labels)}: "
                f"name one of {', '.join(self.labels)}"
            )

    def _add_logged(self) -> None:
        """Declare the propensity and the position as labels, so that `prepare` stores them."""
        if not self.label or not self.logged:  # rows to be scored have neither
            return
        if self.label in self.logged:
            raise ConfigError(
                f"data.columns.label={self.label!r} is also data.columns.propensity or data.columns.position: "
                "name the column that the model learns"
            )
        if not self.labels:
            self.labels = {self.label: LabelConfig(values=self.label_values, threshold=self.label_threshold)}
            self.label_values, self.label_threshold = {}, None
        self.labels = {
            **self.labels,
            **{name: LabelConfig("regression") for name in self.logged if name not in self.labels},
        }

    def _check_weighted(self) -> None:
        self.weighted = expand_ranges(self.weighted)
        if other := [name for name in self.weighted if name not in self.multi_hot]:
            raise ConfigError(
                f"data.columns.weighted names {other[0]!r}, which is not a column of data.columns.multi_hot"
                f"{did_you_mean(other[0], self.multi_hot)}: only the ids of bags have weights"
            )
        if self.weighted and self.list_separator == ":":
            raise ConfigError(
                "data.columns.list_separator=':' separates an id from its weight in the columns of data.columns.weighted: "
                "join the elements of lists by another character"
            )

    def without(self, names: Collection[str]) -> ColumnsConfig:
        """Return the columns except `names`. A sequence that describes one of these becomes a list."""
        followers = [name for name, each in self.sequence.items() if name not in names and each.beside in names]
        gone = {*names, *followers}
        dense, sparse, multi_hot, weighted = (
            [name for name in group if name not in names]
            for group in (self.dense, self.sparse, [*self.multi_hot, *followers], self.weighted)
        )
        sequence = {name: each for name, each in self.sequence.items() if name not in gone}
        vectors = {name: width for name, width in self.vectors.items() if name not in names}
        return replace(
            self, dense=dense, sparse=sparse, multi_hot=multi_hot, sequence=sequence, weighted=weighted, vectors=vectors
        )

    @property
    def logged(self) -> list[str]:
        """Return the columns that say how a row was logged: labels that no model learns."""
        return [name for name in (self.propensity, self.position) if name is not None]

    @property
    def learnable(self) -> dict[str, LabelConfig]:
        """Return the labels that a model may learn."""
        return {name: label for name, label in self.all_labels.items() if name not in self.logged}

    @property
    def lists(self) -> list[str]:
        """Return the columns that hold lists: bags, then sequences."""
        return [*self.multi_hot, *self.sequence]

    @property
    def raw_lists(self) -> list[str]:
        """Return the columns of the source that hold lists: `lists`, then vectors."""
        return [*self.lists, *self.vectors]

    @property
    def vector_features(self) -> list[str]:
        """Return the dense features that the columns of vectors become."""
        return [feature for name, width in self.vectors.items() for feature in vector_features(name, width)]

    @property
    def sequences(self) -> dict[str, SequenceConfig]:
        """Return the sequences with default lengths and sides filled in."""
        return resolve_sequences(self.sequence, self.sparse)

    @property
    def all_labels(self) -> dict[str, LabelConfig]:
        """Return the labels by column; {} for rows to be scored, where `label` is empty."""
        if not self.label:
            return {}
        return self.labels or {self.label: LabelConfig(values=self.label_values, threshold=self.label_threshold)}


def vector_features(name: str, width: int) -> list[str]:
    """Return the names of the dense features that a column of vectors becomes."""
    return [*(f"{name}[{number}]" for number in range(width)), f"{name}[missing]"]


def expand_ranges(names: list[str], key: str = "data.columns") -> list[str]:
    """Replace `cat_{0..3}` by cat_0, cat_1, cat_2 and cat_3. Other names are unchanged."""
    found = []
    for name in names:
        match = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", name)
        first, last = (int(match[2]), int(match[3])) if match else (0, 0)
        if last < first:
            raise ConfigError(f"{key}: {name!r} counts from {first} down to {last}; write the smaller number first")
        found += [f"{match[1]}{number}{match[4]}" for number in range(first, last + 1)] if match else [name]
    return found
