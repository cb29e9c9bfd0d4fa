"""Map the rows of a trained table to those of a pruned one, by a bit a row and a running count for every 64.

A row that is kept lies behind as many others as are kept before it; one that is not is row 0, the unknown row. An
array of row numbers, as FBGEMM's own remapping has it, would take 32 bits a row and give pruned rows no stand-in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.runtime.errors import ServingError

WORD_BITS = 64


class KeptRows:
    """`words` [ceil(num_rows / 64)] uint64: bit i % 64 of word i // 64 says whether row i is kept. Row 0 is."""

    def __init__(self, num_rows: int, words: NDArray[np.uint64]) -> None:
        """Raises ServingError for words that do not fit a table of `num_rows`, or that leave out row 0."""
        if len(words) != -(-num_rows // WORD_BITS) or not num_rows or not int(words[0]) & 1:
            raise ServingError(f"{len(words)} words do not say which of {num_rows} rows are kept, row 0 among them")
        self.num_rows, self.words = num_rows, words
        counts = np.bitwise_count(words)
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.uint32)
        if int(np.sum(counts, dtype=np.int64)) >= 2**32:
            raise ServingError("more than 2^32 rows of a table are kept")

    @property
    def num_kept(self) -> int:
        return int(self._before[-1])

    def remap(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of rows among the kept rows, and 0 for rows that are not kept. Rows are in [0, num_rows)."""
        index, bit = rows >> 6, (rows & 63).astype(np.uint64)
        words = self.words[index]
        is_kept = words >> bit & np.uint64(1)
        below = words & ((np.uint64(1) << bit) - np.uint64(1))
        positions = self._before[index].astype(np.int64) + np.bitwise_count(below)
        return np.where(is_kept, positions, 0)

    def num_kept_below(self, row: int) -> int:
        """How many of rows 0, 1, ..., `row` - 1 are kept; `row` is at most num_rows."""
        if row == self.num_rows:
            return self.num_kept
        index, bit = row >> 6, np.uint64(row & 63)
        below = self.words[index] & ((np.uint64(1) << bit) - np.uint64(1))
        return int(self._before[index]) + int(np.bitwise_count(below))

    def contains(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each row whether it is kept."""
        return (self.words[rows >> 6] >> (rows & 63).astype(np.uint64) & np.uint64(1)).astype(np.bool_)

    def mask(self, first: int, count: int) -> NDArray[np.bool_]:
        """[count]: whether rows first, first + 1, ... are kept. `first` is a multiple of 64."""
        assert first % WORD_BITS == 0
        words = self.words[first // WORD_BITS : -(-(first + count) // WORD_BITS)]
        return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].astype(np.bool_)


class RowMask:
    """Collects which rows of a table are kept, in any order."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._bytes = np.zeros(-(-num_rows // WORD_BITS) * 8, np.uint8)
        self.add(np.zeros(1, np.int64))

    def add(self, rows: NDArray[np.int64]) -> None:
        np.bitwise_or.at(self._bytes, rows >> 3, (1 << (rows & 7)).astype(np.uint8))

    def set_block(self, first: int, kept: NDArray[np.bool_]) -> None:
        """Say of rows first, first + 1, ... whether they are kept. `first` is a multiple of 8."""
        assert first % 8 == 0
        packed = np.packbits(kept, bitorder="little")
        self._bytes[first // 8 : first // 8 + len(packed)] |= packed

    def finish(self) -> KeptRows:
        return KeptRows(self._num_rows, self._bytes.view(np.uint64))
