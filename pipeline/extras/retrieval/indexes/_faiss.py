"""Share code between the indexes of faiss (https://github.com/facebookresearch/faiss, arXiv
2401.08281).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Self

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
    """An index of faiss by inner product, which stores the vectors unchanged."""

    has_file = True
    kind = ""
    class_name = ""  # faiss's name

    def __init__(self, index: faiss.Index) -> None:
        self._index = index

    @classmethod
    def build(cls, vectors: Vectors, config: RetrievalConfig) -> Self:
        index = cls.empty(import_faiss(cls.kind), vectors.shape[1], config)
        index.add(vectors)
        return cls.of(index, config.search)

    @classmethod
    def empty(cls, library: ModuleType, dim: int, config: RetrievalConfig) -> faiss.Index:
        """Return faiss's index without items."""
        raise NotImplementedError

    @classmethod
    def of(cls, index: faiss.Index, search: int) -> Self:
        return cls(index)

    @classmethod
    def load(cls, path: str, num_items: int, dim: int, search: int) -> Self:
        from pipeline.extras.retrieval.index import check_shape

        library = import_faiss(cls.kind)
        try:
            index = library.read_index(path)
        except RuntimeError as error:
            raise ServingError(f"{path} is not an index of faiss ({str(error)[:200]}): export again") from None
        if type(index).__name__ != cls.class_name or index.metric_type != library.METRIC_INNER_PRODUCT:
            raise ServingError(
                f"{path} is a {type(index).__name__}, not a {cls.class_name} of dot products: export again"
            )
        check_shape((index.ntotal, index.d), num_items, dim, path)
        return cls.of(index, search)

    def write(self, path: str) -> None:
        import_faiss(self.kind).write_index(self._index, path)

    def search(self, users: Vectors, k: int) -> tuple[Vectors, Positions]:
        scores, positions = self._index.search(users, min(k, self._index.ntotal))
        return scores, positions

    def scores_of(self, users: Vectors, positions: Positions) -> Vectors:
        scores: Vectors = users @ self._index.reconstruct_batch(positions).T
        return scores
