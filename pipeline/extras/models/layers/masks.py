"""Multiply hidden layers by masks that are computed from the sample (MaskNet, arXiv 2102.07619)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.config.model import LayerSettings
from pipeline.models.layers.features import FeatureInputs
from pipeline.models.layers.mlp import Activation, make_norm


class FeatureNorm(nn.Module):
    """Apply layer norm with separate weights to each feature's vector: [B, F, D] -> [B, F, D]
    (section 3.2).
    """

    def __init__(self, num_features: int, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features, dim))
        self.bias = nn.Parameter(torch.zeros(num_features, dim))
        self._eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normalized = F.layer_norm(rows, self.weight.shape[1:], eps=self._eps)
        return torch.addcmul(self.bias, normalized, self.weight)


class InstanceGuidedMask(nn.Module):
    """Map inputs [B, in_features] to a mask [B, width], with a hidden layer of `reduction` * width
    units (section 3.1).
    """

    def __init__(self, in_features: int, width: int, reduction: float) -> None:
        super().__init__()
        units = max(1, int(width * reduction))
        self.aggregation, self.projection = nn.Linear(in_features, units), nn.Linear(units, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask: torch.Tensor = self.projection(F.relu(self.aggregation(inputs)))
        return mask


class MaskBlock(nn.Module):
    """Map inputs [B, in_features] and hidden [B, width] to [B, out_features]: mask, linear, norm,
    activation (section 3.3).

    inputs: the vectors of the features as looked up. hidden: the numbers that are masked.
    """

    def __init__(
        self, in_features: int, width: int, out_features: int, reduction: float, settings: LayerSettings
    ) -> None:
        super().__init__()
        self.mask = InstanceGuidedMask(in_features, width, reduction)
        self.linear = nn.Linear(width, out_features, bias=False)
        self.norm = make_norm(out_features, settings)
        self._activation_fn = Activation(settings.activation, out_features)
        self.dropout = nn.Dropout(settings.dropout) if settings.dropout else None

    def forward(self, inputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        values = self.linear(self.mask(inputs) * hidden)
        if self.norm is not None:
            values = self.norm(values)
        values = self._activation_fn(values)
        return values if self.dropout is None else self.dropout(values)


class SerialMasks(nn.Module):
    """Apply blocks in sequence, each with a mask from the inputs: map inputs, hidden [B,
    in_features] to [B, layer_sizes[-1]] (figure 3a).
    """

    def __init__(self, in_features: int, layer_sizes: list[int], reduction: float, settings: LayerSettings) -> None:
        super().__init__()
        widths = [in_features, *layer_sizes]
        self.blocks = nn.ModuleList(
            MaskBlock(in_features, width, size, reduction, settings)
            for width, size in zip(widths, layer_sizes, strict=False)
        )

    def forward(self, inputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(inputs, hidden)
        return hidden


class ParallelMasks(nn.Module):
    """Apply blocks in parallel: map inputs, hidden [B, in_features] to [B, num_blocks * block_dim] (figure 3b)."""

    def __init__(
        self, in_features: int, num_blocks: int, block_dim: int, reduction: float, settings: LayerSettings
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            MaskBlock(in_features, in_features, block_dim, reduction, settings) for _ in range(num_blocks)
        )

    def forward(self, inputs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([block(inputs, hidden) for block in self.blocks], dim=1)


class MaskedFeatures(nn.Module):
    """Map dense [B, N] and rows [B, F, D] to logits [B, 1] by blocks of masked features and then the layers `over`."""

    def __init__(
        self, inputs: FeatureInputs, dim: int, blocks: nn.Module, over: nn.Module, has_feature_norm: bool
    ) -> None:
        super().__init__()
        self.inputs, self.blocks, self.over = inputs, blocks, over
        self.norm = FeatureNorm(inputs.num_vectors, dim) if has_feature_norm else None

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        vectors, inputs = self.inputs(dense, rows)
        hidden = inputs
        if self.norm is not None:
            normalized = self.norm(vectors).flatten(1)
            hidden = torch.cat([normalized, inputs[:, normalized.shape[1] :]], dim=1)
        logits: torch.Tensor = self.over(self.blocks(inputs, hidden))
        return logits
