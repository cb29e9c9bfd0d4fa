"""Let the vectors of a sample's features attend to each other, by several heads (AutoInt, arXiv 1810.11921, section 4.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.models.layers.features import FeatureInputs


class MultiHeadInteraction(nn.Module):
    """Apply multi-head attention: rows [B, F, in_features] -> [B, F, width] = relu(concatenated
    heads + residual).

    A head computes for each feature a sum of all features' values, weighted by a softmax of the
    products of its query with all keys. `scale` divides the products by the square root of a head's
    width; the paper does not. The residual is the rows if the widths are equal, otherwise a linear
    map of the rows.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        residual: bool = True,
        scale: bool = False,
        layer_norm: bool = False,
    ) -> None:
        """width: a multiple of `num_heads`. dropout: the share of attention weights to drop."""
        super().__init__()
        self.num_heads, self._dropout = num_heads, dropout
        self._scale = (width // num_heads) ** -0.5 if scale else 1.0
        self.query, self.key, self.value = (nn.Linear(in_features, width, bias=False) for _ in range(3))
        self.residual: nn.Module | None = None
        if residual:
            self.residual = nn.Identity() if in_features == width else nn.Linear(in_features, width, bias=False)
        self.norm = nn.LayerNorm(width) if layer_norm else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # One call for products, softmax and sum, because torch's CPU kernel then writes no [B,
        # heads, F, F] to memory.
        attended = F.scaled_dot_product_attention(
            self._heads(self.query(rows)),
            self._heads(self.key(rows)),
            self._heads(self.value(rows)),
            dropout_p=self._dropout if self.training else 0.0,
            scale=self._scale,
        )
        values = attended.transpose(1, 2).flatten(2)
        if self.residual is not None:
            values = values + self.residual(rows)
        return F.relu(values if self.norm is None else self.norm(values))

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape [B, F, width] to [B, heads, F, width of a head]."""
        return values.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class AttendedFeatures(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to logits [B, 1]: attention layers in sequence, then a
    linear layer.

    If `deep` is given, the logit of an MLP over the inputs is added (AutoInt+, section 5.5).
    """

    def __init__(
        self, inputs: FeatureInputs, layers: list[MultiHeadInteraction], width: int, deep: nn.Module | None
    ) -> None:
        super().__init__()
        self.inputs, self.attention, self.deep = inputs, nn.Sequential(*layers), deep
        self.last = nn.Linear(inputs.num_vectors * width, 1)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        vectors, inputs = self.inputs(dense, rows)
        logits: torch.Tensor = self.last(self.attention(vectors).flatten(1))
        return logits if self.deep is None else logits + self.deep(inputs)
