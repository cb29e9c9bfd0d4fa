"""Find unreadable rows and their reason: by columns for a parsed block, and for a single line of
text.

Both ways use the same rules. Columns are fast. A line that pyarrow cannot read gets its reason from
its text.
"""

from __future__ import annotations

import csv

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.raw.json_lists import JSON, is_json_list
from pipeline.data.raw.label_cells import invalid_labels, label_number, wanted_label, why_no_label, within
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.parse_cells import LARGEST_FLOAT32, is_number, is_time
from pipeline.data.raw.sequences import cell_length, uneven, uneven_rows
from pipeline.data.raw.source import MAX_LINE_BYTES
from pipeline.data.raw.weighted import bad_cell, bad_weights

WANTED_WEIGHT = "a finite number of 0 at least, the row's weight (data.columns.weight)"
FINITE = "a finite 32-bit number"
csv.field_size_limit(MAX_LINE_BYTES)  # 128 KiB by default


def wanted_number(layout: Layout, name: str) -> str:
    """Describe a valid value of one of layout.numbers, for the quarantine's reason."""
    labels = layout.columns.all_labels
    return wanted_label(labels[name]) if name in labels else WANTED_WEIGHT if name in layout.weights else FINITE


def invalid_rows(layout: Layout, table: pa.Table) -> dict[int, str]:
    """Return row -> reason for a typed table. Types alone do not find these problems."""
    reasons: dict[int, str] = {}

    def note(column: str, invalid: pa.ChunkedArray, wanted: str) -> None:
        if pc.any(invalid).as_py():
            for row in np.flatnonzero(invalid.to_numpy()):
                reasons.setdefault(int(row), f"{column} is {table[column][int(row)].as_py()!r}, not {wanted}")

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


def why_unreadable(layout: Layout, header: tuple[str, ...], line: bytes) -> str:
    """Return the reason for one line of text without its line end; "" if it is valid."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    if "\r" in text:
        return "a carriage return inside the row"
    cells = split_cells(layout, text)
    if not cells:
        return "no columns" if not text else "a quote that is not closed in its line"
    if len(cells) != len(header):
        return f"{len(cells)} columns, not {len(header)}"
    values = dict(zip(header, cells, strict=True))
    labels = layout.columns.all_labels
    for name, label in labels.items():
        cell = "" if values[name] in layout.columns.null_values else values[name]
        counts = label.mask is None or label_number(labels[label.mask], values[label.mask]) == 1.0
        if problem := why_no_label(label, cell, counts):
            return f"{name} is {values[name]!r}, not {problem}"
    for name in layout.weights:
        if not is_number(values[name]) or not 0.0 <= float(values[name]) <= LARGEST_FLOAT32:
            return f"{name} is {values[name]!r}, not {WANTED_WEIGHT}"
    for name in layout.columns.dense:
        if values[name] and values[name] not in layout.columns.null_values and not is_number(values[name]):
            return f"{name} is {values[name]!r}, not {FINITE}"
    for name in layout.columns.lists if layout.columns.list_separator == JSON else ():
        if values[name] not in layout.columns.null_values and not is_json_list(values[name]):
            return f"{name} is not a JSON list"
    if problem := _why_uneven(layout, values):
        return problem
    for name in layout.columns.weighted:
        if problem := bad_cell(layout.columns, name, values[name]):
            return problem
    if layout.columns.timestamp and not is_time(values[layout.columns.timestamp]):
        return f"{layout.columns.timestamp} is {values[layout.columns.timestamp]!r}, not a time"
    return ""


def _why_uneven(layout: Layout, values: dict[str, str]) -> str:
    """Return a reason if a sequence of a line has another length than the sequence that it
    describes, otherwise ""."""
    for name, sequence in layout.columns.sequence.items():
        if sequence.beside is not None:
            own, leader = (cell_length(values[each], layout.columns) for each in (name, sequence.beside))
            if own != leader:
                return uneven(name, own, sequence.beside, leader)
    return ""


def split_cells(layout: Layout, text: str) -> list[str]:
    """Split a line into cells.

    Return [] if a quote is not closed: rows over several lines are not supported.
    """
    if not layout.quoted:
        return text.split(layout.delimiter)
    reader = csv.reader([text + "\n", "\n"], delimiter=layout.delimiter)
    try:
        cells = next(reader)
    except csv.Error:  # a carriage return inside the row
        return []
    return cells if reader.line_num == 1 else []
