"""Define HSTU for retrieval: layers of pointwise attention that predict the next item (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.models.next_items import NextItemConfig

if TYPE_CHECKING:
    from torch import nn


@register("model", "hstu_retrieval")
@dataclass
class HSTURetrievalConfig(NextItemConfig):
    """Configure hierarchical sequential transduction units for retrieval (arXiv 2402.17152), with an
    attention bias for each distance of positions, and without time stamps.
    """

    kind: str = "hstu_retrieval"

    def build_block(self, dim: int, num_positions: int) -> nn.Module:
        from pipeline.extras.models.layers.self_attention import HSTUBlock

        return HSTUBlock(dim, self.num_heads, num_positions, self.dropout)
