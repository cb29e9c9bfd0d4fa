"""Read labels that are written as text, or as a number that a threshold divides, and say which values are no label."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.labels import LabelConfig
from pipeline.data.raw.cells import LARGEST_FLOAT32, is_number
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.spelling import spell


def is_text(layout: Layout, name: str) -> bool:
    """Whether the column is a label whose cells data.columns names one by one."""
    label = layout.columns.all_labels.get(name)
    return label is not None and bool(label.values)


def with_labels(layout: Layout, table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Labels as float64, missing ones null; row -> reason where a text is none that data.columns names."""
    reasons: dict[int, str] = {}
    for name, label in layout.columns.all_labels.items():
        column = table[name]
        if label.values:
            texts = spell(column)
            places = pc.index_in(texts, value_set=pa.array(list(label.values), pa.string()))
            unknown = pc.indices_nonzero(pc.and_(pc.is_valid(texts), pc.is_null(places)))
            reasons |= {
                row: f"{name} is {texts[row].as_py()!r}, not {wanted_text(label)}" for row in unknown.to_pylist()
            }
            column = pc.take(pa.array(list(label.values.values()), pa.float64()), places)
        elif label.threshold is not None:
            column = pc.if_else(pc.is_nan(column), None, pc.greater_equal(column, label.threshold)).cast(pa.float64())
        else:
            continue
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table, reasons


def label_number(label: LabelConfig, cell: str) -> float:
    """Of a cell as a text file has it; NaN for a missing value and for what is none."""
    if label.values:
        return float(label.values.get(cell, math.nan))
    value = float(cell) if cell and is_number(cell) else math.nan
    return value if label.threshold is None or math.isnan(value) else float(value >= label.threshold)


def wanted_text(label: LabelConfig) -> str:
    return f"one of {', '.join(map(repr, label.values))}"


def invalid_labels(label: LabelConfig, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Of float64 values, which are none of that label; null where a value is."""
    if label.kind == "binary":
        return pc.invert(pc.is_in(column, pa.array([0.0, 1.0])))
    if label.kind == "regression":
        return pc.invert(within(column, -LARGEST_FLOAT32, LARGEST_FLOAT32))
    is_whole = pc.equal(pc.floor(column), column)
    return pc.invert(pc.and_(is_whole, within(column, 0.0, float((label.num_buckets or 0) - 1))))


def wanted_label(label: LabelConfig) -> str:
    """What a value of it has to be, for the reason of a row that has another."""
    if label.values:
        return wanted_text(label)
    if label.threshold is not None:
        return "a number"
    if label.kind == "ordinal":
        return f"a whole number from 0 to {(label.num_buckets or 0) - 1}"
    return "0 or 1" if label.kind == "binary" else "a finite 32-bit number"


def why_no_label(label: LabelConfig, cell: str, counts: bool) -> str:
    """Empty, or what the text of a cell should be; where it does not count, it may be missing."""
    value = label_number(label, cell)
    if math.isnan(value) and (not cell or (is_number(cell) and not label.values)) and label.mask is not None:
        return wanted_label(label) if counts else ""
    return "" if _is_label(label, value) else wanted_label(label)


def _is_label(label: LabelConfig, value: float) -> bool:
    """As invalid_labels has it, of one value; NaN is none."""
    if label.kind == "binary":
        return value in (0.0, 1.0)
    if label.kind == "regression":
        return abs(value) <= LARGEST_FLOAT32
    return 0.0 <= value <= (label.num_buckets or 0) - 1 and value.is_integer()


def within(column: pa.ChunkedArray, low: float, high: float) -> pa.ChunkedArray:
    """NaN is within nothing."""
    return pc.and_(pc.greater_equal(column, low), pc.less_equal(column, high))
