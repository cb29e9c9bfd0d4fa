"""Define the interface of an index of items' vectors, and choose an index by name and size.

    @register("index", "my_index")
    class MyIndex: ...

An item is identified by its position among the artifact's items, from 0. Scores are dot products.
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

EXACT_BELOW = 100_000  # items; a request that compares with all of them takes about a millisecond
NO_ITEM = -1
SCORES_AT_ONCE = 1 << 24  # numbers in one block of scores, 64 MiB


class ItemIndex(Protocol):
    """The interface of a class registered as "index", whose objects find items. Only one thread may
    call an object.

    has_file: whether an artifact stores the index in a separate file, items.index; otherwise it is
    built from the vectors.
    """

    has_file: bool

    @classmethod
    def build(cls, vectors: Vectors, config: RetrievalConfig) -> ItemIndex:
        """Build the index. Raises ServingError if a required library is missing."""

    @classmethod
    def load(cls, path: str, num_items: int, dim: int, search: int) -> ItemIndex:
        """Load the file that write() wrote. If has_file is false, load the vectors' file (float32,
        row after row).

        Raises:
            ServingError: the file has other items, or a library is missing.
        """

    def write(self, path: str) -> None:
        """Write the index. Called only if has_file is true."""

    def search(self, users: Vectors, k: int) -> tuple[Vectors, Positions]:
        """Return scores [users, k] and positions [users, k], best first. Positions are NO_ITEM if
        fewer than k items were found.
        """

    def scores_of(self, users: Vectors, positions: Positions) -> Vectors:
        """Return exact scores [users, positions]."""


def index_kind(name: str, num_items: int) -> str:
    """Return the name of the index that `auto` stands for."""
    if name != AUTO:
        return name
    return "exact" if num_items < EXACT_BELOW else "hnsw"


def index_class(name: str) -> type[ItemIndex]:
    """Return the class of an index. Raises ConfigError if no index has that name."""
    found: type[ItemIndex] = find("index", name, "retrieval.index")
    return found


def exact_search(users: Vectors, items: torch.Tensor, k: int) -> tuple[Vectors, Positions]:
    """Return scores and positions of the k best items. Each user is compared with all `items` [n,
    dim].
    """
    k = min(k, len(items))
    scores = np.empty((len(users), k), np.float32)
    positions = np.empty((len(users), k), np.int64)
    at_once = max(1, SCORES_AT_ONCE // max(1, len(items)))
    for first in range(0, len(users), at_once):
        best = (torch.from_numpy(users[first : first + at_once]) @ items.T).topk(k, dim=1)
        scores[first : first + at_once], positions[first : first + at_once] = best.values, best.indices
    return scores, positions


def check_shape(found: tuple[int, int], num_items: int, dim: int, path: str) -> None:
    """Raise ServingError if an index has other items than its artifact."""
    if found != (num_items, dim):
        raise ServingError(
            f"{path} has {found[0]:,} items of {found[1]} columns, but the artifact has "
            f"{num_items:,} of {dim}: export again"
        )
