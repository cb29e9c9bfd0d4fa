"""Read labels that are written as text, or as a number that a threshold divides: 0, 1 or the number of a bucket."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.labels import LabelConfig
from pipeline.data.raw.cells import is_number
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
