"""Parse the text of a cell as a number or a time."""

from __future__ import annotations

import math
import re
from functools import lru_cache

import numpy as np
import pyarrow as pa

PLAIN_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?", re.ASCII)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
TIMESTAMP_TYPES = (pa.int64(), pa.timestamp("us", "UTC"), pa.timestamp("us"))


def parse_timestamps(values: pa.Array) -> pa.Array:
    """Return whole numbers unchanged; dates and times as microseconds since 1970, in UTC if they
    have no zone."""
    if pa.types.is_date(values.type):
        values = values.cast(pa.timestamp("us"))
    if pa.types.is_timestamp(values.type):
        return values.cast(pa.timestamp("us", values.type.tz), safe=False).cast(pa.int64())
    for kind in TIMESTAMP_TYPES:
        try:
            return values.cast(kind).cast(pa.int64())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    raise pa.ArrowInvalid(f"neither whole numbers nor ISO 8601 times: {values[:3]}")


@lru_cache(maxsize=4096)  # cells that are not numbers are often the same few words
def is_number(cell: str) -> bool:
    """Return True if pyarrow reads the cell as a number, so that the slow path keeps what the fast
    path keeps."""
    if PLAIN_NUMBER.fullmatch(cell):
        return True
    try:
        value = pa.scalar(cell.strip()).cast(pa.float64()).as_py()
    except pa.ArrowInvalid:
        return False
    return math.isnan(value) or abs(value) <= LARGEST_FLOAT32


def is_time(cell: str) -> bool:
    try:
        return bool(cell) and parse_timestamps(pa.array([cell])).null_count == 0
    except pa.ArrowInvalid:
        return False
