"""Define xDeepFM: a compressed interaction network and an MLP over the same vectors (stdlib only;
layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import InitConfig
from pipeline.models.checks import check_layer_sizes
from pipeline.models.vectors import LinearVectorsConfig

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs


@register("model", "xdeepfm")
@dataclass
class XDeepFMConfig(LinearVectorsConfig):
    """Configure xDeepFM (arXiv 1803.05170): the sum of linear terms, a CIN and an MLP.

    The defaults are those that BARS (arXiv 2205.09626) found best on most of its data sets.
    """

    kind: str = "xdeepfm"
    dropout: float = 0.2
    batch_norm: bool = True
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])
    cin_layer_sizes: list[int] = field(default_factory=lambda: [64])

    @property
    def table_init(self) -> InitConfig:
        """Use smaller weights than for an MLP alone.

        Otherwise products of three or more vectors start with noise from rare ids.
        """
        return InitConfig("normal", 0.001)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes, least=0)
        check_layer_sizes("model.cin_layer_sizes", self.cin_layer_sizes)

    def build_logits(self, inputs: FeatureInputs, num_dense_features: int) -> nn.Module:
        from pipeline.extras.models.layers.cin import CINAndDeep
        from pipeline.models.layers.mlp import MLP

        sizes = self.hidden_layer_sizes
        deep = MLP(inputs.width, sizes, self.layer_settings, out_features=1) if sizes else None
        return CINAndDeep(inputs, num_dense_features, self.cin_layer_sizes, deep, self.linear_scale)
