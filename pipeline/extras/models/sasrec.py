"""Define SASRec: transformer blocks that predict the next item (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.models.next_items import NextItemConfig
from pipeline.runtime.errors import check_at_least

if TYPE_CHECKING:
    from torch import nn


@register("model", "sasrec")
@dataclass
class SASRecConfig(NextItemConfig):
    """Configure self-attentive sequential recommendation (arXiv 1808.09781).

    It is trained by a softmax over negatives instead of one negative for each position.
    feed_forward: the units of each block's hidden layer; None: as many as columns.
    """

    kind: str = "sasrec"
    feed_forward: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.feed_forward", self.feed_forward, 1, allow_none=True)

    def build_block(self, dim: int, num_positions: int) -> nn.Module:
        from pipeline.extras.models.layers.self_attention import TransformerBlock

        return TransformerBlock(dim, self.num_heads, self.feed_forward or dim, self.dropout)
