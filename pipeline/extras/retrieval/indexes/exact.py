"""Find items by comparing with every item, with torch: it needs no library and misses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config.registry import register

if TYPE_CHECKING:
    import torch

    from pipeline.config.serving import RetrievalConfig
    from pipeline.extras.retrieval.index import Positions, Vectors


@register("index", "exact")
class ExactIndex:
    has_file = False

    def __init__(self, items: torch.Tensor) -> None:
        self._items = items

    @classmethod
    def build(cls, vectors: Vectors, config: RetrievalConfig) -> ExactIndex:
        import torch

        return cls(torch.from_numpy(vectors))

    @classmethod
    def load(cls, path: str, num_items: int, dim: int, search: int) -> ExactIndex:
        import numpy as np
        import torch

        from pipeline.extras.retrieval.index import check_shape

        numbers = np.fromfile(path, "<f4")
        check_shape((len(numbers) // dim, dim if len(numbers) % dim == 0 else 0), num_items, dim, path)
        return cls(torch.from_numpy(numbers.reshape(num_items, dim)))

    def write(self, path: str) -> None:
        raise AssertionError("an exact index is its vectors")

    def search(self, users: Vectors, k: int) -> tuple[Vectors, Positions]:
        from pipeline.extras.retrieval.index import exact_search

        return exact_search(users, self._items, k)

    def scores_of(self, users: Vectors, positions: Positions) -> Vectors:
        import torch

        scores: Vectors = (torch.from_numpy(users) @ self._items[torch.from_numpy(positions)].T).numpy()
        return scores
