"""Find items by comparing with every item, with faiss."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.retrieval.indexes._faiss import FaissIndex
from pipeline.extras.retrieval.indexes._faiss_file import check_flat

if TYPE_CHECKING:
    import faiss

    from pipeline.config.serving import RetrievalConfig


@register("index", "flat")
class FlatIndex(FaissIndex):
    kind, check = "flat", staticmethod(check_flat)

    @classmethod
    def empty(cls, library: ModuleType, dim: int, config: RetrievalConfig) -> faiss.Index:
        return library.IndexFlatIP(dim)
