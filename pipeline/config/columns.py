"""Declare the columns of a source and what each column holds (stdlib only)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pipeline.config.labels import LabelConfig, check_labels
from pipeline.config.sequences import SequenceConfig, resolve_sequences
from pipeline.runtime.errors import ConfigError, check_given, did_you_mean


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
    numbers >= 0 that multiply a row's losses and metrics.
    """

    label: str = "label"
    labels: dict[str, LabelConfig] = field(default_factory=dict)
    label_values: dict[str, int] = field(default_factory=dict)
    label_threshold: float | None = None
    weight: str | None = None
    dense: list[str] = field(default_factory=list)
    sparse: list[str] = field(default_factory=list)
    multi_hot: list[str] = field(default_factory=list)
    sequence: dict[str, SequenceConfig] = field(default_factory=dict)
    timestamp: str | None = None
    list_separator: str = "|"
    null_values: list[str] = field(default_factory=list)
    weighted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_given("data.columns.list_separator", self.list_separator)
        self.dense, self.sparse, self.multi_hot = map(expand_ranges, (self.dense, self.sparse, self.multi_hot))
        self._check_weighted()
        resolve_sequences(self.sequence, self.sparse)  # checks them
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

    @property
    def lists(self) -> list[str]:
        """Return the columns that hold lists: bags, then sequences."""
        return [*self.multi_hot, *self.sequence]

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
