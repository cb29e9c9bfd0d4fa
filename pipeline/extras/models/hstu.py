"""Define HSTU: layers of pointwise attention over a sequence with its target (stdlib only; layers
import torch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.extras.models.histories import SelfAttentionConfig

if TYPE_CHECKING:
    from torch import nn


@register("model", "hstu")
@dataclass
class HSTUConfig(SelfAttentionConfig):
    """Configure hierarchical sequential transduction units (arXiv 2402.17152), with an attention
    bias for each distance of positions.

    The unit is as in the paper. But the sequence has only one kind of action, and the bias does not
    use time stamps.
    """

    kind: str = "hstu"
    learnt_positions = False

    def build_block(self, num_positions: int) -> nn.Module:
        from pipeline.extras.models.layers.self_attention import HSTUBlock

        return HSTUBlock(self.attention_dim, self.num_heads, num_positions, self.attention_dropout)
