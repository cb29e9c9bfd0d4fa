"""Work on the bags of a batch: hash, select and separate ids, leave empty bags out, pool rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.read.streams import mix
from pipeline.embeddings.compression.kind import Bags


def hashed_to(num_rows: int, seed: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a seeded hash below num_rows of each id."""
    # The seed is mixed too; otherwise seeds 0 and 1 would swap neighbouring ids.
    words = mix(ids.view(np.uint64) ^ mix(np.array([seed], np.uint64)))
    # Scaling the upper half changes the probability of a row by at most 2**-32.
    return ((words >> np.uint64(32)) * np.uint64(num_rows) >> np.uint64(32)).view(np.int64)


def in_range(bags: Bags, first: int, end: int) -> Bags:
    """Keep the ids first .. end - 1 of each bag, counted from `first`."""
    inside = (bags.ids >= first) & (bags.ids < end)
    if len(bags.ids) == len(bags.lengths) and (bags.lengths == 1).all():
        return Bags(bags.ids[inside] - first, inside.astype(np.int32), at(bags.weights, inside))
    samples = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    lengths = np.bincount(samples[inside], minlength=len(bags.lengths))
    return Bags(bags.ids[inside] - first, lengths.astype(np.int32), at(bags.weights, inside))


def at(weights: NDArray[np.float32] | None, chosen: NDArray[Any]) -> NDArray[np.float32] | None:
    return None if weights is None else weights[chosen]


def sum_of_lengths(features: KeyedJaggedTensor, names: Sequence[str]) -> torch.Tensor:
    """Return [batch]: the number of ids of the features of every sample, also if empty bags are
    left out."""
    keys = features.keys()
    if not features.variable_stride_per_key():
        lengths = features.lengths().view(-1, features.stride())
        return lengths[[keys.index(name) for name in names]].sum(dim=0)
    by_key = dict(zip(keys, features.lengths().split(features.stride_per_key()), strict=True))
    bags = dict(zip(*features.inverse_indices(), strict=True))
    return torch.stack([by_key[name][bags[name]] for name in names]).sum(dim=0)
