"""Read columns of numbers. Find rows with values that are not allowed, with the reason."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.raw.label_cells import invalid_labels, is_text, wanted_label, within
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.parse_cells import LARGEST_FLOAT32, parse_numbers
from pipeline.data.raw.sequences import uneven_rows
from pipeline.data.raw.weighted import bad_weights

WANTED_WEIGHT = "a finite number of 0 at least, the row's weight (data.columns.weight)"
FINITE = "a finite 32-bit number"


def wanted_number(layout: Layout, name: str) -> str:
    """Describe which values of a column in layout.numbers are valid, for the reason in the quarantine file."""
    labels = layout.columns.all_labels
    return wanted_label(labels[name]) if name in labels else WANTED_WEIGHT if name in layout.weights else FINITE


def invalid_rows(layout: Layout, table: pa.Table, raw: pa.Table | None = None) -> dict[int, str]:
    """Return row -> reason for rows of a typed table that have invalid values, although their types
    are right.

    `raw` has the same rows as text in the file; a reason quotes this text.
    """
    reasons: dict[int, str] = {}

    def note(column: str, invalid: pa.ChunkedArray, wanted: str) -> None:
        if pc.any(invalid).as_py():
            for row in np.flatnonzero(invalid.to_numpy()):
                written = raw if raw is not None and pa.types.is_string(raw[column].type) else table
                reasons.setdefault(int(row), f"{column} is {written[column][int(row)].as_py()!r}, not {wanted}")

    for name, label in layout.columns.all_labels.items():
        column, invalid = table[name], invalid_labels(label, table[name])
        if label.mask is not None:  # a missing value is invalid only if it counts
            counts = pc.fill_null(pc.equal(table[label.mask], 1.0), False)
            invalid = pc.if_else(pc.is_null(column, nan_is_null=True), counts, invalid)
        note(name, pc.fill_null(invalid, True), wanted_label(label))
    for name in layout.weights:
        note(name, pc.fill_null(pc.invert(within(table[name], 0.0, LARGEST_FLOAT32)), True), WANTED_WEIGHT)
    for name in layout.columns.dense:
        # NaN compares as false. It is a missing value, as pandas writes it.
        ends = pc.min_max(table[name]).as_py().values()
        if any(end is not None and abs(end) > LARGEST_FLOAT32 for end in ends):
            note(name, pc.fill_null(pc.greater(pc.abs(table[name]), LARGEST_FLOAT32), False), FINITE)
    if layout.columns.timestamp:
        note(layout.columns.timestamp, pc.is_null(table[layout.time_column]), "a time")
    for row, reason in (*uneven_rows(layout.columns, table), *bad_weights(layout.columns, table)):
        reasons.setdefault(row, reason)
    return reasons


def with_numbers(layout: Layout, table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Return columns of labels, weight and dense features as float64, and row -> reason if a text
    is not a number. Empty text and data.columns.null_values are missing values.
    """
    reasons: dict[int, str] = {}
    for name in layout.numbers:
        column = table[name]
        if is_text(layout, name) or column.type == pa.float64():
            continue
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            missing = pc.is_in(column, pa.array(["", *layout.columns.null_values], column.type))
            texts = pc.if_else(missing, None, column)
            column, found = parse_numbers(texts)
            for row in found:
                reasons.setdefault(row, f"{name} is {texts[row].as_py()!r}, not {wanted_number(layout, name)}")
        else:
            column = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
            column = column.cast(pa.float64(), safe=False)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table, reasons
