"""An index of items in one file: NumPy sorts the scores of all of them."""

from __future__ import annotations

import numpy as np

from pipeline.config.registry import register
from pipeline.config.serving import RetrievalConfig
from pipeline.extras.retrieval.index import Positions, Vectors


@register("index", "sorted_scores")
class SortedScores:
    has_file = True

    def __init__(self, items: Vectors) -> None:
        self._items = items

    @classmethod
    def build(cls, vectors: Vectors, config: RetrievalConfig) -> SortedScores:
        return cls(vectors)

    @classmethod
    def load(cls, path: str, num_items: int, dim: int, search: int) -> SortedScores:
        return cls(np.fromfile(path, "<f4").reshape(num_items, dim))

    def write(self, path: str) -> None:
        self._items.astype("<f4").tofile(path)

    def search(self, users: Vectors, k: int) -> tuple[Vectors, Positions]:
        scores = users @ self._items.T
        positions = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, positions, axis=1), positions

    def scores_of(self, users: Vectors, positions: Positions) -> Vectors:
        return users @ self._items[positions].T
