"""Turn text values into 64-bit hashes that are the same on every machine and in every release.

SplitMix64's finalizer (https://prng.di.unimi.it/splitmix64.c) over a value's bytes, eight at a time, little-endian, then
over their number.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def hash_ids(values: pa.Array, size: int, seed: int) -> np.ndarray:
    """Ids in [1, size) of text values, 0 where missing."""
    ids = hash_text(values, seed) % np.uint64(size - 1) + np.uint64(1)
    return np.where(pc.is_null(values).to_numpy(zero_copy_only=False), 0, ids.astype(np.int64))


def hash_text(values: pa.Array, seed: int) -> np.ndarray:
    """[len(values)] uint64; a missing value is hashed as the empty one."""
    values = values.cast(pa.large_binary())
    _, offsets_buffer, bytes_buffer = values.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(bytes_buffer, dtype=np.uint8) if bytes_buffer else np.zeros(0, np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    state = np.full(len(values), _mix(np.array([seed], dtype=np.uint64))[0])
    for begin in range(0, int(lengths.max(initial=0)), 8):
        rows = np.flatnonzero(lengths > begin)
        word = np.zeros(len(rows), dtype=np.uint64)
        for i in range(8):
            inside = lengths[rows] > begin + i
            word[inside] |= data[starts[rows[inside]] + begin + i].astype(np.uint64) << np.uint64(8 * i)
        state[rows] = _mix(state[rows] ^ word)
    return _mix(state ^ lengths.astype(np.uint64))


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
