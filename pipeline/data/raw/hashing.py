"""Hash text values to 64 bits, alike on every machine and in every release.

SplitMix64's finalizer (https://prng.di.unimi.it/splitmix64.c) over a value's bytes, eight at a time, little-endian, then
over their number.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.data.raw.texts import WORD_BYTES, Texts, texts_of

VALUES_AT_ONCE = 1 << 20  # whose bytes are copied


def hash_ids(values: pa.Array, size: int | NDArray[np.int64], seed: int) -> np.ndarray:
    """Ids in [1, size) of text values, 0 where missing. `size` may be one of each value."""
    sizes = np.asarray(size).astype(np.uint64)
    ids = hash_text(values, seed) % (sizes - np.uint64(1)) + np.uint64(1)
    if not values.null_count:
        return ids.astype(np.int64)
    return np.where(pc.is_null(values).to_numpy(zero_copy_only=False), 0, ids.astype(np.int64))


def hash_text(values: pa.Array, seed: int) -> NDArray[np.uint64]:
    """[len(values)]; a missing value is hashed as the empty one."""
    if len(values) <= VALUES_AT_ONCE:
        return hash_texts(texts_of([values]), seed)
    parts = range(0, len(values), VALUES_AT_ONCE)
    return np.concatenate([hash_texts(texts_of([values.slice(begin, VALUES_AT_ONCE)]), seed) for begin in parts])


def hash_texts(texts: Texts, seed: int) -> NDArray[np.uint64]:
    """[len(texts)]"""
    lengths = texts.lengths(np.arange(len(texts)))
    state: NDArray[np.uint64] = np.full(len(texts), mix(np.array([seed], dtype=np.uint64))[0])
    for begin in range(0, int(lengths.max(initial=0)), WORD_BYTES):
        which = np.flatnonzero(lengths > begin)
        state[which] = mix(state[which] ^ texts.words(which, begin))
    return mix(state ^ lengths.astype(np.uint64))


def mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64: its increment, then its finalizer."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
