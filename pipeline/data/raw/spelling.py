"""Spell the values of categories: one text for a value, whatever type a file, a request or a stream gives it.

Whole numbers have no point and no exponent, also where they are stored as fractions, as pandas stores a column of
whole numbers with a missing value: 12345678901.0 is the id 12345678901.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

LARGEST_WHOLE = 2.0**63  # of the fractions that are spelled as whole numbers


def spell(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """As text, pa.string(); a missing value stays one."""
    if not pa.types.is_floating(values.type):
        return values.cast(pa.string())
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), LARGEST_WHOLE))
    if not pc.any(is_whole).as_py():
        return values.cast(pa.string())
    whole = pc.if_else(is_whole, values, pa.scalar(None, values.type)).cast(pa.int64(), safe=False)
    return pc.coalesce(whole.cast(pa.string()), values.cast(pa.string()))


def spell_value(value: Any) -> str | None:
    """Of one value as JSON gives it. Raises ValueError for a list or an object."""
    if value is None or type(value) is str:
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _fraction(value + 0.0)  # one text for both zeros
    if isinstance(value, list | dict):
        raise ValueError(f"{'a list' if isinstance(value, list) else 'an object'} where one value is read")
    return str(value)


@lru_cache(maxsize=1 << 16)
def _fraction(value: float) -> str:
    if value.is_integer() and abs(value) < LARGEST_WHOLE:
        return str(int(value))
    text: str = pa.array([value]).cast(pa.string())[0].as_py()
    return text
