"""The names of a source's columns, and what each holds (stdlib only)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pipeline.config.labels import LabelConfig, check_labels
from pipeline.config.sequences import SequenceConfig, resolve_sequences
from pipeline.runtime.errors import ConfigError, check_given, did_you_mean


@dataclass
class ColumnsConfig:
    """Names of the source's columns. Criteo's own (label, int_0..12, cat_0..25) are fixed by the format.

    A list-valued categorical column (Parquet list, or text joined by `list_separator`) goes
    into `multi_hot`, or into `sequence` where its order counts (config.sequences); every other categorical column into
    `sparse`. `timestamp` (whole numbers, or ISO 8601) is read where data.split.kind=time or date. `cat_{0..25}` in a list stands for cat_0 to cat_25. Empty text is a missing value, so is each word of
    `null_values`, and for dense columns NaN. list_separator=json: lists are JSON, [1, 2] or ["a", "b"].
    weighted: columns of multi_hot whose elements are id:weight, split at the last colon; an element without one counts 1.

    A single label is binary and needs no entry in `labels`; `label_values` and `label_threshold` are its values and threshold. Of several, `label` is the main one: a model of one task learns
    it, the gate goes by it; the first binary one where `label` names none of them. weight: a column of numbers of 0 at
    least, by which a row's losses and metrics are weighted.
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
                f"data.columns.label_{key} is of a single label, and data.columns.labels lists {len(self.labels)}: "
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
                f"data.columns.weighted names {other[0]!r}, which is no column of data.columns.multi_hot"
                f"{did_you_mean(other[0], self.multi_hot)}: only the ids of bags have weights"
            )
        if self.weighted and self.list_separator == ":":
            raise ConfigError(
                "data.columns.list_separator=':' separates an id from its weight in the columns of data.columns.weighted: "
                "join the elements of lists by another character"
            )

    @property
    def lists(self) -> list[str]:
        """The columns with a list a row: bags, then sequences."""
        return [*self.multi_hot, *self.sequence]

    @property
    def sequences(self) -> dict[str, SequenceConfig]:
        """With every length and side."""
        return resolve_sequences(self.sequence, self.sparse)

    @property
    def all_labels(self) -> dict[str, LabelConfig]:
        """By column; empty for rows that are to be scored, where `label` is empty."""
        if not self.label:
            return {}
        return self.labels or {self.label: LabelConfig(values=self.label_values, threshold=self.label_threshold)}


def expand_ranges(names: list[str], key: str = "data.columns") -> list[str]:
    """`cat_{0..3}` becomes cat_0, cat_1, cat_2 and cat_3; other names stay."""
    found = []
    for name in names:
        match = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", name)
        first, last = (int(match[2]), int(match[3])) if match else (0, 0)
        if last < first:
            raise ConfigError(f"{key}: {name!r} counts from {first} down to {last}; write the smaller one first")
        found += [f"{match[1]}{number}{match[4]}" for number in range(first, last + 1)] if match else [name]
    return found
