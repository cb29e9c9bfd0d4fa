"""Multiply two linear maps in each layer (FINAL: Factorized Interaction Layer for CTR Prediction,
Zhu et al., SIGIR 2023).
"""

from __future__ import annotations

import torch
from torch import nn

from pipeline.config.model import LayerSettings
from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.mlp import Activation, make_norm


class FactorizedLayer(nn.Module):
    """Map x [B, in_features] to [B, out_features]: combine h = W x + b and h * (V x + c), then apply
    a norm, activation and dropout.
    """

    def __init__(self, in_features: int, out_features: int, is_concat: bool, settings: LayerSettings) -> None:
        """is_concat: `h` and the products are halves of the output; otherwise the output is their sum."""
        super().__init__()
        self._is_concat = is_concat
        self.linear = nn.Linear(in_features, out_features if is_concat else 2 * out_features)
        self.norm = make_norm(out_features, settings)
        self._activation_fn = Activation(settings.activation, out_features)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden, factors = self.linear(features).chunk(2, dim=1)
        products = hidden * factors
        values = torch.cat([hidden, products], dim=1) if self._is_concat else hidden + products
        if self.norm is not None:
            values = self.norm(values)
        dropped: torch.Tensor = self.dropout(self._activation_fn(values))
        return dropped


class FactorizedBlock(nn.Sequential):
    """Map [B, in_features] to logits [B, 1]: layers of `layer_sizes` columns, then a linear layer.

    Layer n has products of degree 2^n.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], is_concat: bool, settings: LayerSettings) -> None:
        widths = [in_features, *layer_sizes]
        layers = (
            FactorizedLayer(width, size, is_concat, settings) for width, size in zip(widths, layer_sizes, strict=False)
        )
        super().__init__(*layers, nn.Linear(widths[-1], 1))


class VectorGates(nn.Module):
    """Multiply vectors [B, F, D] by gates [B, F, D], a linear map over the F vectors. Gates start at 1."""

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_vectors, num_vectors))
        self.bias = nn.Parameter(torch.ones(num_vectors, 1))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors * (self.weight @ vectors + self.bias)


class FactorizedStreams(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to logits [B, 1], the mean of the logits of the blocks.

    trains_each: in training, return the logits of each block instead, [B, 2].
    """

    def __init__(
        self,
        inputs: FeatureInputs,
        gates: VectorGates | None,
        first: FactorizedBlock,
        second: FactorizedBlock | None,
        trains_each: bool,
    ) -> None:
        super().__init__()
        self.inputs, self.gates, self.first, self.second = inputs, gates, first, second
        self._trains_each = trains_each

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        vectors, inputs = self.inputs(dense, rows)
        gated = inputs if self.gates is None else torch.cat([inputs, self.gates(vectors).flatten(1)], dim=1)
        logits: torch.Tensor = self.first(gated)
        if self.second is None:
            return logits
        logits = torch.cat([logits, self.second(inputs)], dim=1)
        return logits if self._trains_each and self.training else logits.mean(dim=1, keepdim=True)
