"""Convert values of categories to text: one value has one text, for every type of a file, a request
or a stream.

Whole numbers are written without point and exponent, even if they are stored as fractions. pandas
stores a column of whole numbers with a missing value that way: 12345678901.0 is the id 12345678901.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

LARGEST_WHOLE = 2.0**63  # fractions below this are written as whole numbers if they are whole


def to_text(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the values as pa.string(). A missing value stays missing."""
    if not pa.types.is_floating(values.type):
        return values.cast(pa.string())
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), LARGEST_WHOLE))
    if not pc.any(is_whole).as_py():
        return values.cast(pa.string())
    whole = pc.if_else(is_whole, values, pa.scalar(None, values.type)).cast(pa.int64(), safe=False)
    return pc.coalesce(whole.cast(pa.string()), values.cast(pa.string()))


def value_to_text(value: Any) -> str | None:
    """Return the text of one JSON value. Raises ValueError for a list or an object."""
    if value is None or type(value) is str:
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _fraction(value + 0.0)  # both zeros have one text
    if isinstance(value, list | dict):
        raise ValueError(f"{'a list' if isinstance(value, list) else 'an object'} instead of one value")
    return str(value)


@lru_cache(maxsize=1 << 16)
def _fraction(value: float) -> str:
    if value.is_integer() and abs(value) < LARGEST_WHOLE:
        return str(int(value))
    text: str = pa.array([value]).cast(pa.string())[0].as_py()
    return text
