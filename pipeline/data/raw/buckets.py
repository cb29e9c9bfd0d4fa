"""Put numbers into buckets, alike in preparation and in serving."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def bucket_numbers(values: NDArray[np.float64], boundaries: Sequence[float]) -> NDArray[np.int64]:
    """[n]: how many boundaries are at most the value; -1 where it is missing (NaN)."""
    numbers = np.searchsorted(np.asarray(boundaries, np.float64), values, side="right")
    return np.where(np.isnan(values), -1, numbers)


def bucket_texts(values: NDArray[np.float64], boundaries: Sequence[float]) -> list[str | None]:
    """[n]: the number of each value's bucket as its vocabulary has it; None where it is missing."""
    return [None if number < 0 else str(number) for number in bucket_numbers(values, boundaries).tolist()]


def bucket_column(values: pa.ChunkedArray, boundaries: Sequence[float]) -> pa.ChunkedArray:
    """As bucket_texts, of a column of numbers."""
    numbers = values.to_numpy().astype(np.float64)  # missing values become NaN
    return pa.chunked_array([pa.array(bucket_texts(numbers, boundaries), pa.string())])
