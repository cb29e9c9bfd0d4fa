"""Turn one-hot ids into multi-hot bags, the way the MLPerf DLRMv2 data set was made, without a table of them.

MLPerf draws, for each row of a table, a fixed bag: the row's own id and size - 1 ids uniform over the table.
Here a hash of (feature, id, place in the bag) is the draw, so nothing of cardinality x size is ever held.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from pipeline.data.streams import mix

MAX_CARDINALITY = 2**32  # the 32 upper bits of a hash are scaled to the cardinality


def draw_bags(ids: NDArray[np.int64], feature: str, cardinality: int, size: int) -> NDArray[np.int64]:
    """[rows] ids -> [rows, size] bags in [0, cardinality): first the id itself, then ids that it and the feature decide.

    As in MLPerf's tables, draws may repeat. The same id gives the same bag in every run, on every rank.
    """
    bags = np.empty((len(ids), size), np.int64)
    bags[:, 0] = ids
    if size > 1:
        seeds = mix(ids.astype(np.uint64) ^ _feature_key(feature))
        draws = seeds[:, None] * _multipliers(feature, size - 1)
        draws >>= np.uint64(32)
        draws *= np.uint64(cardinality)
        draws >>= np.uint64(32)
        bags[:, 1:] = draws
    return bags


def _feature_key(feature: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(feature.encode()).digest()[:8], "little"))


def _multipliers(feature: str, count: int) -> NDArray[np.uint64]:
    """Odd factors, one a place: multiply-shift hashing on top of `mix`."""
    return mix(np.arange(1, count + 1, dtype=np.uint64) + _feature_key(feature)) | np.uint64(1)
