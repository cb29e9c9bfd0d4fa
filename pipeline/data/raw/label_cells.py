"""Read labels that are text, or numbers compared with a threshold, and find invalid labels."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.columns import LabelConfig
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.parse_cells import LARGEST_FLOAT32
from pipeline.data.raw.value_types import to_text


def is_text(layout: Layout, name: str) -> bool:
    """Return True if data.columns maps this label's texts to numbers."""
    label = layout.columns.all_labels.get(name)
    return label is not None and bool(label.values)


def with_labels(layout: Layout, table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Return the table with labels as float64, null if missing. Also return row -> reason for texts
    that data.columns does not list.
    """
    reasons: dict[int, str] = {}
    for name, label in layout.columns.all_labels.items():
        column = table[name]
        if label.values:
            texts = to_text(column)
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


def wanted_text(label: LabelConfig) -> str:
    return f"one of {', '.join(map(repr, label.values))}"


def invalid_labels(label: LabelConfig, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of bool: True for each float64 value that is not a valid label. A null value gives null."""
    if label.kind == "binary":
        return pc.invert(pc.is_in(column, pa.array([0.0, 1.0])))
    if label.kind == "regression":
        return pc.invert(within(column, -LARGEST_FLOAT32, LARGEST_FLOAT32))
    is_whole = pc.equal(pc.floor(column), column)
    return pc.invert(pc.and_(is_whole, within(column, 0.0, float((label.num_buckets or 0) - 1))))


def wanted_label(label: LabelConfig) -> str:
    """Describe which values are valid, for the reason in the quarantine file."""
    if label.values:
        return wanted_text(label)
    if label.threshold is not None:
        return "a number"
    if label.num_buckets is not None:
        return f"a whole number from 0 to {(label.num_buckets or 0) - 1}"
    return "0 or 1" if label.kind == "binary" else "a finite 32-bit number"


def within(column: pa.ChunkedArray, low: float, high: float) -> pa.ChunkedArray:
    """Return a column of bool: True for values in [low, high]. NaN gives False."""
    return pc.and_(pc.greater_equal(column, low), pc.less_equal(column, high))
