"""Count list lengths, and cut sequences to their maximum length. prepare and serve use the same
code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config.columns import ColumnsConfig, SequenceConfig

Value = TypeVar("Value")


def list_lengths(column: pa.Array | pa.ChunkedArray, separator: str) -> NDArray[np.int64]:
    """Return [rows]: the length of each list, or of each text in which `separator` joins elements.

    A missing list has length 0.
    """
    if pa.types.is_list(column.type):
        counts = pc.list_value_length(column)
    else:
        counts = pc.add(pc.count_substring(column, separator), 1)
    lengths: NDArray[np.int64] = np.asarray(pc.fill_null(counts, 0)).astype(np.int64)
    return lengths


def uneven_rows(columns: ColumnsConfig, table: pa.Table) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for each sequence whose length differs from the length of the sequence
    that it describes.
    """
    for name, sequence in columns.sequence.items():
        if sequence.beside is None:
            continue
        own, leader = (list_lengths(table[each], columns.list_separator) for each in (name, sequence.beside))
        for row in np.flatnonzero(own != leader).tolist():
            yield (
                row,
                f"{name} has {own[row]} values, not the {leader[row]} of {sequence.beside}, which it describes",
            )


def cut_lists(
    values: pa.Array, lengths: NDArray[np.integer], sequence: SequenceConfig
) -> tuple[pa.Array, NDArray[np.integer]]:
    """Return the values of all rows in one array, and each row's number of values. A row has at
    most max_length values.
    """
    limit = sequence.max_length
    if limit is None or not len(lengths) or int(lengths.max()) <= limit:
        return values, lengths
    kept = np.minimum(lengths, limit)
    starts = np.cumsum(lengths) - lengths
    if sequence.keep != "first":
        starts = starts + lengths - kept
    ends = np.cumsum(kept)
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - kept), kept)
    return values.take(pa.array(positions)), kept


def cut_list(values: Sequence[Value], sequence: SequenceConfig) -> Sequence[Value]:
    """Cut the list of one row in the same way as cut_lists."""
    limit = sequence.max_length
    if limit is None or len(values) <= limit:
        return values
    return values[:limit] if sequence.keep == "first" else values[len(values) - limit :]
