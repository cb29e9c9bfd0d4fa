"""Measure what a join of the newest values would have leaked into the training rows.

For each joined column: the share of training rows whose value differs from the newest value of
their key, and the AUC of the label by this column alone, with the value as of the row's time and
with the newest value. The score of a value is its label rate (with PRIOR_ROWS rows at the mean
rate) in the training rows of half of the keys. The AUC is measured on the other keys, so a value
that only names its key scores nothing. A number with many values is put into quantiles, and a list
counts by its last element.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config.columns import ColumnsConfig
from pipeline.config.transforms import LIST
from pipeline.data.dataset import Dataset
from pipeline.data.prepare.encode import Features, codes_of
from pipeline.data.quality import auc
from pipeline.data.raw.value_types import is_list, plain, spelled, to_text
from pipeline.data.read.streams import mix
from pipeline.extras.joins.versions import Versions

PRIOR_ROWS = 10.0
NUM_QUANTILES = 100
ERRORS = 4.0  # a difference of AUC of so many standard errors is called a leak
COUNTS = ("rows", "counted", "positives", "at_once")
Numbers = NDArray[np.int64]


class Counts:
    """Counts training rows by the version that they see and the newest version."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []

    def add(
        self,
        visible: NDArray[np.int32],
        latest: NDArray[np.int32],
        labels: NDArray[np.bool_],
        counted: NDArray[np.bool_],
        at_once: NDArray[np.int32],
    ) -> None:
        """counted: the rows whose label counts."""
        pairs, of_row = np.unique(visible.astype(np.int64) << 32 | latest, return_inverse=True)
        chosen = (np.ones(len(visible)), counted, counted & labels, at_once)
        sums = [np.bincount(of_row, each, len(pairs)).astype(np.int64) for each in chosen]
        self._parts.append(pa.table([pairs >> 32, pairs & 0xFFFFFFFF, *sums], names=["visible", "latest", *COUNTS]))

    def finish(self) -> pa.Table:
        schema = pa.schema([(name, pa.int64()) for name in ("visible", "latest", *COUNTS)])
        table = pa.concat_tables([schema.empty_table(), *self._parts]).group_by(["visible", "latest"])
        summed = table.aggregate([(name, "sum") for name in COUNTS])
        return summed.rename_columns([name.removesuffix("_sum") for name in summed.column_names]).select(schema.names)


def measure(counts: pa.Table, versions: Versions, features: Features, columns: ColumnsConfig) -> dict[str, Any]:
    """Return the numbers of the report for one table. counts: as Counts.finish returns them."""
    found = {name: counts[name].to_numpy() for name in counts.column_names}
    visible, latest, rows = found["visible"], found["latest"], found["rows"]
    keys = np.append(0, versions.keys)[latest]
    learns = mix(keys.astype(np.uint64)) % np.uint64(2) == 0
    total, is_binary = max(int(rows.sum()), 1), features.labels[features.label].kind == "binary"
    about: dict[str, Any] = {}
    for name in versions.table.column_names:
        column = versions.table[name]
        values, groups = _values_of(column)
        about[name] = {"differs": round(float(rows[values[visible] != values[latest]].sum()) / total, 6)}
        if is_binary and name not in columns.vectors:
            areas = [_area(groups[each], found, learns) for each in (visible, latest)]
            about[name] |= {"auc": [None if math.isnan(each) else round(each, 4) for each in areas]}
    num_keys = len(np.unique(keys[~learns]))
    return {
        "rows": int(rows.sum()),
        "unmatched": int(rows[visible == 0].sum()),
        "unknown_keys": int(rows[latest == 0].sum()),
        "at_once": int(found["at_once"].sum()),
        # of as many independent rows as keys, because the rows of a key may all have one label
        "auc_error": round(1 / math.sqrt(3 * max(num_keys, 1)), 6),
        "columns": about,
    }


def _values_of(column: pa.ChunkedArray) -> tuple[Numbers, Numbers]:
    """Return the number of the value of each version, and the number of the value that AUC counts
    it by. Version 0, and a missing value, is 0."""
    column = plain(column)
    if pa.types.is_floating(column.type):
        numbers = column.to_numpy()
        distinct, of_row = np.unique(numbers, return_inverse=True)
        values = np.where(np.isnan(numbers), 0, of_row + 1)
        if len(distinct) > NUM_QUANTILES:
            ends = np.nanquantile(numbers, np.linspace(0, 1, NUM_QUANTILES + 1)[1:-1])
            groups = np.where(values == 0, 0, np.searchsorted(ends, numbers, side="right") + 1)
            return _with_none(values), _with_none(groups)
        return _with_none(values), _with_none(values)
    if not is_list(column.type):
        values = codes_of(column.combine_chunks())[0]
        return _with_none(values), _with_none(values)
    lists = spelled(column, LIST).combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths)
    flat = lists.flatten()
    last = flat.take(pa.array(ends - 1, mask=lengths == 0)) if len(flat) else pa.nulls(len(lists), pa.string())
    whole = pc.binary_join(lists, "\x1f")
    return _with_none(codes_of(whole)[0]), _with_none(codes_of(to_text(last))[0])


def _with_none(codes: NDArray[np.integer]) -> Numbers:
    return np.concatenate([np.zeros(1, np.int64), codes])


def _area(groups: Numbers, found: dict[str, Numbers], learns: NDArray[np.bool_]) -> float:
    """Return the AUC of the label rate of each group, which is learned from the counts that `learns`
    marks, on the other ones."""
    size = int(groups.max(initial=0)) + 1
    (rows, positives), (others, other_positives) = (
        [np.bincount(groups[chosen], found[name][chosen], size) for name in ("counted", "positives")]
        for chosen in (learns, ~learns)
    )
    rate = positives.sum() / max(rows.sum(), 1)
    scores = (positives + PRIOR_ROWS * rate) / (rows + PRIOR_ROWS)
    labels, weights = np.repeat([1, 0], size), np.concatenate([other_positives, others - other_positives])
    return auc(np.concatenate([scores, scores]), labels, weights)


def describe_joins(dataset: Dataset) -> list[str]:
    """Return the lines that `prepare` prints."""
    lines = []
    for side in dataset.side_tables:
        about = side.about
        total = max(about["rows"], 1)
        lines.append(
            f"  joined {about['table']} on {about['on']}: {side.num_rows:,} versions stored once; of the training rows "
            f"{about['unmatched'] / total:.2%} see no version ({about['unknown_keys'] / total:.2%} have a key that it lacks)"
        )
        for name, column in about["columns"].items():
            line = f"    {name:24}{column['differs']:8.2%} differ from the newest value"
            if (areas := column.get("auc")) and None not in areas:
                line += (
                    f"; AUC of this column alone {areas[0]:.4f} as of the row's time, {areas[1]:.4f} with the newest"
                )
                if areas[1] - areas[0] > ERRORS * about["auc_error"]:
                    line += ": a leak"
            lines.append(line)
        if about["at_once"]:
            lines.append(
                f"    {about['at_once']:,} rows see a version that was written at exactly their time: if rows are written "
                "after the event that they describe, set delay=1 in data.joins"
            )
    return lines
