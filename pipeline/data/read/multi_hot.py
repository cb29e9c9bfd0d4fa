"""Sample multi-hot bags from one-hot ids as in the MLPerf DLRMv2 data set, without storing them.

MLPerf samples a fixed bag for each row of a table: the row's own id and size - 1 uniform ids. Here
a hash of (feature, id, position in the bag) is the sample, so nothing of size cardinality x size is
stored.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pipeline.data.read.streams import mix

DRAWS_AT_ONCE = 2**14  # 128 KB of 64-bit words fit the cache


def sample_bags(ids: NDArray[np.int64], feature: str, cardinality: int, bags: NDArray[np.int64]) -> None:
    """Fill bags [rows, size] for ids [rows]: first the id itself, then ids in [0, cardinality) that
    depend on id and feature.

    As in MLPerf's tables, ids in a bag may repeat. An id gets the same bag in every run and on
    every rank. cardinality <= 2**32, because the upper 32 bits of a hash are scaled to the
    cardinality.
    """
    assert bags.flags.c_contiguous, "a copy would be filled instead"
    num_rows, size = bags.shape
    if size > 1 and num_rows:
        # Flat arrays, because numpy is slow if the innermost axis is as short as a bag.
        flat = bags.reshape(-1).view(np.uint64)
        rows_at_once = max(1, DRAWS_AT_ONCE // size)
        multipliers = _multipliers(feature, size, rows_at_once)
        seeds = mix(ids.astype(np.uint64) ^ _feature_key(feature))
        for begin in range(0, num_rows, rows_at_once):
            samples = np.repeat(seeds[begin : begin + rows_at_once], size)
            samples *= multipliers[: len(samples)]
            samples >>= np.uint64(32)
            samples *= np.uint64(cardinality)
            np.right_shift(samples, np.uint64(32), out=flat[begin * size : begin * size + len(samples)])
    bags[:, 0] = ids


@cache
def _feature_key(feature: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(feature.encode()).digest()[:8], "little"))


@cache
def _multipliers(feature: str, size: int, num_rows: int) -> NDArray[np.uint64]:
    """Return an odd factor for each position in a bag (for multiply-shift hashing after `mix`). The
    factors are repeated for all rows.
    """
    factors = mix(np.arange(size).astype(np.uint64) + _feature_key(feature)) | np.uint64(1)
    return np.tile(factors, num_rows)
