"""Read the columns of data.columns.vectors: lists of numbers, one number for each dense feature.

A missing vector (null, an empty text or an empty list) becomes zeros and a 1 in the feature
`<name>[missing]`. So the first linear layer learns a row that stands for a missing vector.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.columns import vector_features
from pipeline.data.raw.layout import Layout
from pipeline.data.raw.parse_cells import LARGEST_FLOAT32, parse_numbers
from pipeline.data.raw.value_types import is_list


def with_vectors(layout: Layout, table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Return each column of vectors as lists of float64, null if the vector is missing, and row ->
    reason for a vector of another width or with a value that is not a finite 32-bit number."""
    reasons: dict[int, str] = {}
    for name, width in layout.columns.vectors.items():
        lists = _lists(layout, table[name].combine_chunks())
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        written = lists.flatten()
        values = _numbers(written)
        bad = ~(np.abs(values) <= LARGEST_FLOAT32)  # NaN too
        rows = np.repeat(np.arange(len(lists)), lengths)
        for row in np.flatnonzero((lengths != width) & (lengths > 0)).tolist():
            reasons.setdefault(row, f"{name} has {lengths[row]} numbers, data.columns.vectors.{name} is {width}")
        for place in np.flatnonzero(bad).tolist():
            reasons.setdefault(int(rows[place]), f"{name} has {written[place].as_py()!r}, not a finite 32-bit number")
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        made = pa.ListArray.from_arrays(offsets, pa.array(values), mask=pa.array(lengths == 0))
        table = table.set_column(table.schema.get_field_index(name), name, made)
    return table, reasons


def expand_vectors(table: pa.Table, vectors: Mapping[str, int]) -> pa.Table:
    """Return the table with the dense features of each column of vectors in place of the column.

    Raises pa.ArrowInvalid if a vector has another width, or a number that is missing or not finite.
    """
    for name, width in vectors.items():
        column = table[name].combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        present = lengths > 0
        values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
        if (lengths[present] != width).any() or not (np.abs(values) <= LARGEST_FLOAT32).all():
            raise pa.ArrowInvalid(f"{name} has vectors that are not {width} finite numbers")
        numbers = np.zeros((width + 1, len(column)))
        numbers[:width, present] = values.reshape(-1, width).T
        numbers[width] = ~present
        table = table.drop_columns([name])
        for feature, of_feature in zip(vector_features(name, width), numbers, strict=True):
            table = table.append_column(feature, pa.array(of_feature))
    return table


def _lists(layout: Layout, column: pa.Array) -> pa.ListArray:
    """Return lists; text is split at data.columns.list_separator."""
    if is_list(column.type):
        return column
    texts = column.cast(pa.string())
    missing = pc.is_in(texts, pa.array(["", *layout.columns.null_values], pa.string()))
    return pc.split_pattern(pc.if_else(missing, None, texts), layout.columns.list_separator)


def _numbers(values: pa.Array) -> np.ndarray:
    """Return [n] float64, NaN for a missing value and for text that is not a number."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = parse_numbers(pa.chunked_array([values]))[0].combine_chunks()
    elif pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    return np.asarray(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
