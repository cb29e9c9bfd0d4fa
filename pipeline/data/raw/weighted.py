"""Split the elements of weighted bags, `id:weight`, into ids and weights. prepare and serve use the
same code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config.columns import ColumnsConfig
from pipeline.data.raw.parse_cells import LARGEST_FLOAT32
from pipeline.data.raw.value_types import to_text

MARK = ":"  # the last one in an element separates the weight; without it the weight is 1
# Numbers that pyarrow's cast and Python's float() read equally.
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
MAX_SHOWN = 80


def split_elements(elements: pa.Array) -> tuple[pa.Array, NDArray[np.float64]]:
    """Split [n] elements into ids [n] and weights [n].

    A weight is NaN if its text is not a finite 32-bit number.
    """
    if pa.types.is_dictionary(elements.type):
        elements = elements.dictionary_decode()
    texts = pc.fill_null(to_text(elements), "")
    parts = pc.split_pattern(texts, MARK, max_splits=1, reverse=True)
    has_weight = np.asarray(pc.equal(pc.list_value_length(parts), 2))
    starts = parts.offsets.to_numpy()[:-1]
    flat = parts.values
    weights = np.ones(len(texts))
    weights[has_weight] = _numbers(flat.take(pa.array(starts[has_weight] + 1)))
    weights[np.abs(weights) > LARGEST_FLOAT32] = np.nan
    return flat.take(pa.array(starts)), weights


def _numbers(texts: pa.Array) -> NDArray[np.float64]:
    """Parse texts as numbers. The result is NaN for a text that is not a number."""
    try:
        return np.asarray(texts.cast(pa.float64()))
    except pa.ArrowInvalid:
        is_number = pc.match_substring_regex(texts, f"^(?:{NUMBER.pattern})$")
        return np.asarray(pc.if_else(is_number, texts, "nan").cast(pa.float64()))


def split_element(element: str | None) -> tuple[str, float] | None:
    """Split one element as split_elements does. Return None if its weight is not a finite 32-bit number."""
    text, mark, last = (element or "").rpartition(MARK)
    if not mark:
        return last, 1.0
    weight = float(last) if NUMBER.fullmatch(last) else np.inf
    return (text, weight) if abs(weight) <= LARGEST_FLOAT32 else None


def bad_weights(columns: ColumnsConfig, table: pa.Table) -> Iterator[tuple[int, str]]:
    """Yield (row, reason) for each element with an invalid weight."""
    for name in columns.weighted:
        column = table[name].combine_chunks()
        if not pa.types.is_list(column.type):
            column = pc.split_pattern(column, columns.list_separator)
        elements = column.flatten()
        _, weights = split_elements(elements)
        if (bad := np.flatnonzero(np.isnan(weights))).size:
            lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
            rows = np.repeat(np.arange(len(column)), lengths)[bad]
            for row, position in zip(rows.tolist(), bad.tolist(), strict=True):
                yield row, _problem(name, elements[position])


def _problem(name: str, element: pa.Scalar) -> str:
    try:
        shown = repr(element.as_py())[:MAX_SHOWN]
    except UnicodeDecodeError:
        shown = "an element"
    return f"{name} holds {shown}, whose weight (after its last {MARK!r}) is not a finite 32-bit number"


def weights_of_lists(lists: Sequence[Sequence[str] | None]) -> tuple[list[list[str]], list[float]] | None:
    """Split lists of elements. Return the ids by list and the weights as one list; None if an element is invalid."""
    ids: list[list[str]] = []
    weights: list[float] = []
    for elements in lists:
        parts = [split_element(element) for element in elements or ()]
        sound = [part for part in parts if part is not None]
        if len(sound) < len(parts):
            return None
        ids.append([text for text, _ in sound])
        weights += [weight for _, weight in sound]
    return ids, weights
