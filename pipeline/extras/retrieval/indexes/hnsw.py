"""Find items through a graph of neighbours, with faiss (HNSW, arXiv 1603.09320): fast for millions
of items, but approximate.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Self

from pipeline.config.registry import register
from pipeline.extras.retrieval.indexes._faiss import FaissIndex, import_faiss
from pipeline.extras.retrieval.indexes._faiss_file import check_graph

if TYPE_CHECKING:
    import faiss

    from pipeline.config.serving import RetrievalConfig
    from pipeline.extras.retrieval.index import Positions, Vectors


@register("index", "hnsw")
class HnswIndex(FaissIndex):
    kind, check = "hnsw", staticmethod(check_graph)

    def __init__(self, index: faiss.Index, search: int) -> None:
        super().__init__(index)
        self._search = search

    @classmethod
    def empty(cls, library: ModuleType, dim: int, config: RetrievalConfig) -> faiss.Index:
        index = library.IndexHNSWFlat(dim, config.neighbours, library.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = config.build_search
        return index

    @classmethod
    def of(cls, index: faiss.Index, search: int) -> Self:
        return cls(index, search)

    def search(self, users: Vectors, k: int) -> tuple[Vectors, Positions]:
        """Search with more candidates than k: at least `search`, and at least 2 * k."""
        k = min(k, self._index.ntotal)
        candidates = min(max(self._search, 2 * k), self._index.ntotal)
        parameters = import_faiss(self.kind).SearchParametersHNSW(efSearch=candidates)
        scores, positions = self._index.search(users, k, params=parameters)
        return scores, positions
