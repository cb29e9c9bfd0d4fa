"""Read lists that text columns hold as JSON: [1, 2] or ["a", "b"]."""

from __future__ import annotations

import json

import pyarrow as pa

from pipeline.data.raw.spelling import spell_value

JSON = "json"  # as data.columns.list_separator


def parse_list(cell: str | None) -> list[str] | None:
    """Its values as text; None where it is missing. Raises ValueError for anything but a list of texts, numbers and nulls."""
    if not cell:
        return None
    values = json.loads(cell, parse_int=str)
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        raise ValueError(f"{cell[:80]!r} is no list of values")
    return [spell_value(value) or "" for value in values]


def is_json_list(cell: str) -> bool:
    try:
        parse_list(cell)
    except ValueError:
        return False
    return True


def json_lists(column: pa.ChunkedArray) -> tuple[pa.Array, list[int]]:
    """A column of lists of text, and the rows that hold none; each distinct cell is read once."""
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
