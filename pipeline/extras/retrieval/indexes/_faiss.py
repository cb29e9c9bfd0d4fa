"""Code that all indexes of faiss share (https://github.com/facebookresearch/faiss, arXiv
2401.08281).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.runtime.errors import ServingError

if TYPE_CHECKING:
    import faiss

    from pipeline.config.serving import RetrievalConfig
    from pipeline.extras.retrieval.index import Positions, Vectors


def import_faiss(kind: str) -> ModuleType:
    """Import faiss. Raises ServingError if it is not installed."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ServingError(
            f"retrieval.index={kind} needs faiss: pip install 'torchrec-pipeline[retrieval]', or export with "
            f"retrieval.index=exact, which compares with every item ({error})"
        ) from error


class FaissIndex:
    """An index of faiss with the inner product as score. It stores the vectors unchanged."""

    has_file = True
    kind = ""
    check: Callable[[NDArray[np.uint8], int, int], None]  # raises ValueError for a file that faiss must not read

    def __init__(self, index: faiss.Index) -> None:
        self._index = index

    @classmethod
    def build(cls, vectors: Vectors, config: RetrievalConfig) -> Self:
        index = cls.empty(import_faiss(cls.kind), vectors.shape[1], config)
        index.add(vectors)
        return cls.of(index, config.search)

    @classmethod
    def empty(cls, library: ModuleType, dim: int, config: RetrievalConfig) -> faiss.Index:
        """Return an empty faiss index."""
        raise NotImplementedError

    @classmethod
    def of(cls, index: faiss.Index, search: int) -> Self:
        return cls(index)

    @classmethod
    def load(cls, path: str, num_items: int, dim: int, search: int) -> Self:
        library = import_faiss(cls.kind)
        try:
            cls.check(np.memmap(path, np.uint8, "r"), num_items, dim)
            index = library.read_index(path)
        except (RuntimeError, ValueError) as error:
            raise ServingError(
                f"{path} is not an index of kind {cls.kind} ({str(error)[:200]}): export again"
            ) from None
        return cls.of(index, search)

    def write(self, path: str) -> None:
        import_faiss(self.kind).write_index(self._index, path)

    def search(self, users: Vectors, k: int) -> tuple[Vectors, Positions]:
        scores, positions = self._index.search(users, min(k, self._index.ntotal))
        return scores, positions

    def scores_of(self, users: Vectors, positions: Positions) -> Vectors:
        scores: Vectors = users @ self._index.reconstruct_batch(positions).T
        return scores
