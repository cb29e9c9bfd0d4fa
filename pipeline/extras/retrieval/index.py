"""Define what an index of items' vectors is, and choose one by name and size.

    @register("index", "my_index")
    class MyIndex: ...

An item is known by its position among the artifact's items, from 0. Scores are dot products.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.registry import find
from pipeline.config.serving import AUTO, RetrievalConfig
from pipeline.runtime.errors import ServingError

Vectors = NDArray[np.float32]  # [n, dim]
Positions = NDArray[np.int64]

EXACT_BELOW = 100_000  # items: a request that compares with all of them takes about a millisecond
NO_ITEM = -1
SCORES_AT_ONCE = 1 << 24  # numbers in one block of scores, 64 MiB


class ItemIndex(Protocol):
    """What is registered as an "index": a class whose objects find items. One caller at a time.

    has_file: whether an artifact keeps the index in a file of its own, items.index; else it is made of the vectors.
    """

    has_file: bool

    @classmethod
    def build(cls, vectors: Vectors, config: RetrievalConfig) -> ItemIndex:
        """Raises ServingError where a library that it needs is missing."""

    @classmethod
    def load(cls, path: str, num_items: int, dim: int, search: int) -> ItemIndex:
        """From what write() wrote, or from the vectors' file, float32 row after row, where has_file is false.

        Raises:
            ServingError: the file is of other items, or a library is missing.
        """

    def write(self, path: str) -> None:
        """Only where has_file."""

    def search(self, users: Vectors, k: int) -> tuple[Vectors, Positions]:
        """Scores [users, k] and positions [users, k], the best first; NO_ITEM where fewer were found."""

    def scores_of(self, users: Vectors, positions: Positions) -> Vectors:
        """[users, positions]: exact."""


def index_kind(name: str, num_items: int) -> str:
    """The name of the index that `auto` stands for."""
    if name != AUTO:
        return name
    return "exact" if num_items < EXACT_BELOW else "hnsw"


def index_class(name: str) -> type[ItemIndex]:
    """Raises ConfigError where there is none of that name."""
    found: type[ItemIndex] = find("index", name, "retrieval.index")
    return found


def exact_search(users: Vectors, items: torch.Tensor, k: int) -> tuple[Vectors, Positions]:
    """Scores and positions of the k best of `items` [n, dim], by comparing with all of them."""
    k = min(k, len(items))
    scores = np.empty((len(users), k), np.float32)
    positions = np.empty((len(users), k), np.int64)
    at_once = max(1, SCORES_AT_ONCE // max(1, len(items)))
    for first in range(0, len(users), at_once):
        best = (torch.from_numpy(users[first : first + at_once]) @ items.T).topk(k, dim=1)
        scores[first : first + at_once], positions[first : first + at_once] = best.values, best.indices
    return scores, positions


def check_shape(found: tuple[int, int], num_items: int, dim: int, path: str) -> None:
    """Raises ServingError where an index has other items than its artifact."""
    if found != (num_items, dim):
        raise ServingError(
            f"{path} has {found[0]:,} items of {found[1]} columns, the artifact {num_items:,} of {dim}: export again"
        )
