"""Give numpy the bytes of text columns eight at a time, of many texts at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

WORD_BYTES = 8
WITHIN = np.array([(1 << 8 * count) - 1 for count in range(WORD_BYTES + 1)], np.uint64)  # so many bytes of a word


class Texts:
    """Text i is `data` from offsets[i] to offsets[i + 1]; behind the last one `data` has WORD_BYTES more."""

    def __init__(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        self.data, self.offsets = data, offsets
        # A word begins at every byte: the array's steps are of one byte, its numbers of eight.
        self.all_words: NDArray[np.uint64] = np.ndarray(len(data) - WORD_BYTES + 1, "<u8", data, strides=(1,))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """In bytes."""
        return self.offsets[which + 1] - self.offsets[which]

    def words(self, which: NDArray[np.int64], begin: int) -> NDArray[np.uint64]:
        """Bytes from `begin` on of texts that are longer than that, little-endian, 0 behind a text's end."""
        words = self.all_words[self.offsets[which] + begin]
        return words & WITHIN[np.minimum(self.lengths(which) - begin, WORD_BYTES)]


def texts_of(columns: list[pa.Array]) -> Texts:
    """A copy of text or bytes, one column after the other; a missing value is an empty one."""
    columns = [column.cast(pa.large_binary()) for column in columns]
    offsets = [_offsets(column) for column in columns]
    ends = np.cumsum([0, *(bounds[-1] - bounds[0] for bounds in offsets)])
    data = np.zeros(int(ends[-1]) + WORD_BYTES, np.uint8)
    for column, bounds, begin, end in zip(columns, offsets, ends, ends[1:], strict=False):
        if begin < end:
            data[begin:end] = np.frombuffer(column.buffers()[2], np.uint8, int(end - begin), int(bounds[0]))
    joined = [bounds[1:] - (bounds[0] - begin) for bounds, begin in zip(offsets, ends, strict=False)]
    return Texts(data, np.concatenate([np.zeros(1, np.int64), *joined]))


def _offsets(column: pa.Array) -> NDArray[np.int64]:
    return np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + len(column) + 1]
