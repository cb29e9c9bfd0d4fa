"""Compute the columns that data.transforms and data.columns.vectors declare. prepare and serve use the same code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.transforms import LIST, NUMBER, TEXT, TransformConfig
from pipeline.data.raw.value_types import to_text
from pipeline.data.raw.vectors import expand_vectors

TYPES = {NUMBER: pa.float64(), TEXT: pa.string(), LIST: pa.list_(pa.string())}


def derive(
    table: pa.Table,
    transforms: Mapping[str, TransformConfig],
    null_values: Sequence[str] = (),
    vectors: Mapping[str, int] = MappingProxyType({}),
) -> pa.Table:
    """Return the table with a column for each transform, and with the dense features of vectors in
    place of their columns. `table` has the columns that parse_block returns.

    Raises pa.ArrowInvalid if a column's type does not fit its transform.
    """
    table = expand_vectors(table, vectors)
    for column, transform in transforms.items():
        inputs = [_read(table[name], kind, null_values) for name, kind in transform.inputs.items()]
        made = transform.apply(inputs)
        assert len(made) == table.num_rows, f"{column} has {len(made)} of {table.num_rows} rows"
        table = table.append_column(column, made.cast(TYPES[transform.output]))
    return table


def _read(column: pa.ChunkedArray, kind: str, null_values: Sequence[str]) -> pa.Array:
    """Return the column as float64 or text, with nulls for missing values. Times keep their type."""
    array = column.combine_chunks()
    if kind == NUMBER:
        return pa.array(np.asarray(array.to_numpy(zero_copy_only=False), np.float64), from_pandas=True)
    if pa.types.is_temporal(array.type) and kind != TEXT:
        return array
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        raise pa.ArrowInvalid("a list, but the transform reads one value per row")
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    texts = to_text(array)
    missing = pc.is_in(texts, pa.array(["", *null_values], pa.string()))
    return pc.if_else(missing, pa.scalar(None, pa.string()), texts)
