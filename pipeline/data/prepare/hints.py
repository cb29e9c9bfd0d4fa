"""Find columns whose values were probably read in a way that the user did not intend."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pyarrow.parquet as pq

from pipeline.data.dataset import Dataset, SparseFeature
from pipeline.runtime.storage import storage

LOOKED_AT = 200  # most frequent values of each feature that are checked
ONE_VALUE_SHARE = 0.99
NULL_WORDS = ("NULL", "null", "\\N", "NA", "N/A", "n/a", "nan", "NaN", "None", "none", "<NA>")
MAX_NAMED = 5


def find_hints(dataset: Dataset, folder: str, num_negative: Mapping[str, int]) -> list[str]:
    """Return one line for each kind of finding. The line names the columns and the key that fixes it."""
    tokens = {each.name: _frequent(each, folder) for each in dataset.sparse_features if each.boundaries is None}
    lists = [name for name, values in tokens.items() if _mostly_in_brackets(values)]
    words = {name: [word for word in NULL_WORDS if word in values] for name, values in tokens.items()}
    nulls = sorted({word for found in words.values() for word in found})
    constant = [
        each.name
        for each in dataset.sparse_features
        if each.cardinality > 2
        and each.frequency_curve.ranks[:1] == [1]
        and each.frequency_curve.shares[0] >= ONE_VALUE_SHARE
    ]
    empty = [each.name for each in dataset.sparse_features if each.vocabulary and each.cardinality == 1]
    lines = _of_labels(dataset)
    if empty:
        lines.append(
            f"no value with an id of its own: {_named(empty)}; a column without values, or with rarer ones than "
            "data.ids.min_frequency"
        )
    if num_negative and not dataset.bayes_auc:  # generated data are meant so
        rows = dataset.accepted_rows
        counts = [f"{name} ({count:,} of {rows:,})" for name, count in num_negative.items()]
        lines.append(
            f"negative values that log1p takes for 0: {_named(counts)}; data.dense_transforms.<column>=signed_log1p, "
            "standardize or none keeps them"
        )
    if lists:
        lines.append(
            f"values in brackets, each list one id: {_named(lists)}; data.columns.multi_hot and "
            "data.columns.list_separator=json read lists"
        )
    if nulls:
        named = [name for name, found in words.items() if found]
        listed = ",".join(null if null.isalpha() else f"'{null}'" for null in nulls)
        key = shlex.quote(f"data.columns.null_values=[{listed}]")
        lines.append(f"{', '.join(map(repr, nulls))} as values of {_named(named)}; {key} takes them for missing")
    if constant:
        lines.append(
            f"one value in {ONE_VALUE_SHARE:.0%} of the rows or more: {_named(constant)}; is that the right column?"
        )
    return lines


def _of_labels(dataset: Dataset) -> list[str]:
    """Return the splits in which the main label is binary and has the same value in all rows."""
    kind = next((label.kind for label in dataset.labels if label.name == dataset.label), "binary")
    same = {
        name: int(split.num_positives > 0)
        for name, split in dataset.splits.items()
        if split.num_rows and split.num_positives in (0, split.num_rows)
    }
    if kind != "binary" or not same:
        return []
    counts = ", ".join(f"{value} in all {dataset.splits[name].num_rows:,} {name} rows" for name, value in same.items())
    clicks = "; models of retrieval can, from clicks alone" if set(same.values()) == {1} else ""
    return [f"{dataset.label} is {counts}: a model of clicks cannot learn, or be measured, with one class{clicks}"]


def _frequent(feature: SparseFeature, folder: str) -> list[str]:
    if feature.vocabulary is None:
        return []
    with storage.open_file(storage.join(folder, feature.vocabulary), "rb") as raw, pq.ParquetFile(raw) as file:
        batch = next(file.iter_batches(LOOKED_AT, columns=["value"]), None)
    return [] if batch is None else [str(value) for value in batch["value"].to_pylist()]


def _mostly_in_brackets(values: list[str]) -> bool:
    return 2 * sum(value[:1] == "[" and value[-1:] == "]" for value in values) > len(values)


def _named(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
