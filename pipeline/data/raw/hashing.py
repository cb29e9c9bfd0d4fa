"""Hash text values to 64 bits, with equal results on every machine and in every release.

The hash is SplitMix64's finalizer (https://prng.di.unimi.it/splitmix64.c) over a value's bytes,
eight at a time, little-endian, and then over their number.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.read.streams import mix

VALUES_AT_ONCE = 1 << 20  # values whose bytes are copied in one call
WORD_BYTES = 8
# masks of the first n bytes of a word
WITHIN = np.array([(1 << 8 * count) - 1 for count in range(WORD_BYTES + 1)], np.uint64)


def hash_ids(values: pa.Array, size: int | NDArray[np.int64], seed: int) -> np.ndarray:
    """Return ids in [1, size) for text values, and 0 for missing values. `size` may be an array
    with one number per value.
    """
    sizes = np.asarray(size).astype(np.uint64)
    ids = hash_text(values, seed) % (sizes - np.uint64(1)) + np.uint64(1)
    if not values.null_count:
        return ids.astype(np.int64)
    return np.where(pc.is_null(values).to_numpy(zero_copy_only=False), 0, ids.astype(np.int64))


def hash_text(values: pa.Array, seed: int) -> NDArray[np.uint64]:
    """Return [len(values)] hashes. A missing value has the hash of the empty text."""
    if len(values) <= VALUES_AT_ONCE:
        return hash_texts(texts_of([values]), seed)
    parts = range(0, len(values), VALUES_AT_ONCE)
    return np.concatenate([hash_texts(texts_of([values.slice(begin, VALUES_AT_ONCE)]), seed) for begin in parts])


def hash_texts(texts: Texts, seed: int) -> NDArray[np.uint64]:
    """Return [len(texts)] hashes."""
    lengths = texts.lengths(np.arange(len(texts)))
    state: NDArray[np.uint64] = np.full(len(texts), mix(np.array([seed], dtype=np.uint64))[0])
    for begin in range(0, int(lengths.max(initial=0)), WORD_BYTES):
        which = np.flatnonzero(lengths > begin)
        state[which] = mix(state[which] ^ texts.words(which, begin))
    return mix(state ^ lengths.astype(np.uint64))


class Texts:
    """Texts in one array.

    Text i is `data` from offsets[i] to offsets[i + 1]; `data` ends with WORD_BYTES more bytes.
    """

    def __init__(self, data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> None:
        self.data, self.offsets = data, offsets
        # A word starts at every byte: the stride is one byte, the item size eight.
        self.all_words: NDArray[np.uint64] = np.ndarray(len(data) - WORD_BYTES + 1, "<u8", data, strides=(1,))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length in bytes of each text."""
        return self.offsets[which + 1] - self.offsets[which]

    def words(self, which: NDArray[np.int64], begin: int) -> NDArray[np.uint64]:
        """Return the 8-byte word of each text at byte `begin`, little-endian, with zeros after the
        text's end. The texts must be longer than `begin`.
        """
        words = self.all_words[self.offsets[which] + begin]
        return words & WITHIN[np.minimum(self.lengths(which) - begin, WORD_BYTES)]


def texts_of(columns: list[pa.Array]) -> Texts:
    """Copy texts or bytes to one array, one column after the other. A missing value is an empty text."""
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
