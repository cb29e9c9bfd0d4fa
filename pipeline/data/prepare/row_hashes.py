"""Hash complete rows to 64 bits, column by column, to find equal rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.data.raw.hashing import hash_text
from pipeline.data.read.streams import mix


class RowHashes:
    """Hashes of rows.

    Equal rows have equal hashes. Different rows have equal hashes with probability 2^-64. Add
    columns in a fixed order.
    """

    def __init__(self, num_rows: int) -> None:
        self._state: NDArray[np.uint64] = np.zeros(num_rows, dtype=np.uint64)

    def add_numbers(self, values: NDArray[np.float64]) -> None:
        """Add [num_rows] numbers. Every NaN is one missing value, and -0.0 is 0.0."""
        numbers = np.where(np.isnan(values), np.nan, values) + 0.0
        self._state = mix(self._state ^ numbers.astype(np.float64).view(np.uint64))

    def add_texts(
        self, codes: np.ndarray, distinct: pa.Array, lengths: np.ndarray | None, weights: np.ndarray | None = None
    ) -> None:
        """Add values as codes: code c means distinct[c - 1], and 0 means missing.

        `lengths` are the numbers of codes per row. `weights` are [codes] float32; -0.0 equals 0.0.
        """
        of_code = np.concatenate([np.zeros(1, np.uint64), hash_text(distinct, 0)])
        hashes = of_code[codes]
        if weights is not None:
            hashes = mix(hashes ^ mix((weights + 0.0).astype(np.float64).view(np.uint64)))
        if lengths is not None:
            hashes = _of_lists(hashes, lengths)
        self._state = mix(self._state ^ hashes)

    def finish(self) -> NDArray[np.uint64]:
        return self._state


def _of_lists(hashes: NDArray[np.uint64], lengths: np.ndarray) -> NDArray[np.uint64]:
    """Return [num_rows] hashes of each list. A hash depends on the values, their order and their number."""
    ends = np.cumsum(lengths)
    offsets = np.arange(len(hashes)) - np.repeat(ends - lengths, lengths)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mix(hashes ^ mix(offsets.astype(np.uint64))))])
    return sums[ends] - sums[ends - lengths] ^ mix(lengths.astype(np.uint64))
