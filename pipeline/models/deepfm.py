"""Define DeepFM (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.models.checks import check_layer_sizes
from pipeline.models.vectors import LinearVectorsConfig

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs


@register("model", "deepfm")
@dataclass
class DeepFMConfig(LinearVectorsConfig):
    """Configure DeepFM (arXiv 1703.04247): linear terms, a factorization machine and an MLP.

    The defaults are those that BARS (arXiv 2205.09626) found best on most of its data sets.
    """

    kind: str = "deepfm"
    dropout: float = 0.2
    batch_norm: bool = True
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes)

    def build_logits(self, inputs: FeatureInputs, num_dense_features: int) -> nn.Module:
        from pipeline.models.layers.fm import FMAndDeep
        from pipeline.models.layers.mlp import MLP

        deep = MLP(inputs.width, self.hidden_layer_sizes, self.layer_settings, out_features=1)
        return FMAndDeep(inputs, num_dense_features, deep, self.linear_scale)
