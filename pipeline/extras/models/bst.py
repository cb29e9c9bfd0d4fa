"""Define BST: transformer blocks over a sequence with its target at the end (stdlib only; layers
import torch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.models.histories import SelfAttentionConfig
from pipeline.runtime.errors import check_at_least

if TYPE_CHECKING:
    from torch import nn


@register("model", "bst")
@dataclass
class BSTConfig(SelfAttentionConfig):
    """Configure the behaviour sequence transformer (arXiv 1905.06874), with causal attention as in
    SASRec (arXiv 1808.09781).

    Positions are learnt. feed_forward: the units of each block's hidden layer. The blocks' output
    at the target's position is an input of the MLP.
    """

    kind: str = "bst"
    feed_forward: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.feed_forward", self.feed_forward, 1)

    def build_block(self, num_positions: int) -> nn.Module:
        from pipeline.extras.models.layers.self_attention import TransformerBlock

        return TransformerBlock(self.attention_dim, self.num_heads, self.feed_forward, self.attention_dropout)
