"""Read lists that text columns store as JSON: [1, 2] or ["a", "b"]."""

from __future__ import annotations

import json

import pyarrow as pa

from pipeline.data.raw.value_types import value_to_text

JSON = "json"  # value of data.columns.list_separator


def parse_list(cell: str | None) -> list[str] | None:
    """Return the list's values as text, None if the cell is empty.

    Raises ValueError unless the cell is a list of texts, numbers and nulls.
    """
    if not cell:
        return None
    values = json.loads(cell, parse_int=str)
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        raise ValueError(f"{cell[:80]!r} is not a list of values")
    return [value_to_text(value) or "" for value in values]


def json_lists(column: pa.ChunkedArray) -> tuple[pa.Array, list[int]]:
    """Return a column of lists of text, and the numbers of the rows that are not lists.

    Each distinct cell is parsed only once.
    """
    encoded = column.combine_chunks().dictionary_encode()
    lists, bad = [], set()
    for number, cell in enumerate(encoded.dictionary.to_pylist()):
        try:
            lists.append(parse_list(cell))
        except ValueError:
            lists.append(None)
            bad.add(number)
    parsed = pa.array(lists, pa.list_(pa.string())).take(encoded.indices)
    rows = [row for row, number in enumerate(encoded.indices.to_pylist()) if number in bad] if bad else []
    return parsed, rows
