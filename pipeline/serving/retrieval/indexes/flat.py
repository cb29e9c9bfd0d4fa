"""Find items by comparing with every one of them, by faiss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.config.registry import register
from pipeline.serving.retrieval.indexes._faiss import FaissIndex

if TYPE_CHECKING:
    from pipeline.config.serving import RetrievalConfig


@register("index", "flat")
class FlatIndex(FaissIndex):
    kind, class_name = "flat", "IndexFlatIP"

    @classmethod
    def empty(cls, faiss: Any, dim: int, config: RetrievalConfig) -> Any:
        return faiss.IndexFlatIP(dim)
