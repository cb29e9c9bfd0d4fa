"""Give two streams of layers separate views of the features, and fuse their outputs (FinalMLP,
arXiv 2304.00902).
"""

from __future__ import annotations

import torch
from torch import nn

from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.mlp import MLP


class FeatureGate(nn.Module):
    """Map rows [B, F, dim] to a gate [B, width] of values from 0 to 2, computed from the context
    features' rows (section 3.2).

    Without context features the gate is computed from a learnt vector: [1, width], the same for all
    samples.
    """

    def __init__(self, positions: list[int], dim: int, layer_sizes: list[int], width: int) -> None:
        """positions: the positions of the context features among the F features."""
        super().__init__()
        self._positions = positions
        self.context = None if positions else nn.Parameter(torch.zeros(1, dim))
        self.layers = MLP(dim * max(1, len(positions)), layer_sizes, out_features=width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        context = rows[:, self._positions].flatten(1) if self.context is None else self.context
        gate: torch.Tensor = self.layers(context)
        return 2 * torch.sigmoid(gate)


class Stream(nn.Module):
    """Map inputs [B, in_features] and rows [B, F, D] to [B, width of the last layer]: multiply the
    inputs by their gate and apply `layers`.
    """

    def __init__(self, gate: FeatureGate | None, layers: MLP) -> None:
        super().__init__()
        self.gate, self.layers = gate, layers

    def forward(self, inputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(inputs if self.gate is None else inputs * self.gate(rows))
        return hidden


class BilinearFusion(nn.Module):
    """Map first [B, M] and second [B, N] to logits [B, 1]: linear terms, and the sum of x_h^T W_h
    y_h over heads h (section 3.3).

    A head takes a share of the columns of each vector: k heads have M N / k weights.
    """

    def __init__(self, first_features: int, second_features: int, num_heads: int) -> None:
        """num_heads: it must divide both widths."""
        super().__init__()
        self.num_heads = num_heads
        self.first, self.second = nn.Linear(first_features, 1), nn.Linear(second_features, 1)
        weight = torch.empty(num_heads, first_features // num_heads, second_features // num_heads)
        # Initialized as one linear layer over all products of columns (Glorot and Bengio 2010).
        self.weight = nn.Parameter(nn.init.normal_(weight, std=(2 / (weight.numel() + 1)) ** 0.5))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        heads = first.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
        crossed = torch.bmm(heads, self.weight).transpose(0, 1).flatten(1) * second
        logits: torch.Tensor = self.first(first) + self.second(second) + crossed.sum(dim=1, keepdim=True)
        return logits


class TwoStreams(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to logits [B, 1]: two streams over the same inputs,
    fused.
    """

    def __init__(self, inputs: FeatureInputs, first: Stream, second: Stream, fusion: BilinearFusion) -> None:
        super().__init__()
        self.inputs, self.first, self.second, self.fusion = inputs, first, second, fusion

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        _, inputs = self.inputs(dense, rows)
        logits: torch.Tensor = self.fusion(self.first(inputs, rows), self.second(inputs, rows))
        return logits
