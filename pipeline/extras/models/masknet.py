"""Define MaskNet: layers whose inputs are multiplied by masks computed from the sample (stdlib
only; layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import InitConfig
from pipeline.models.checks import check_layer_sizes
from pipeline.models.vectors import VectorsConfig
from pipeline.runtime.errors import check_above, check_at_least, check_choice

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs

MASKNET_VARIANTS = ("serial", "parallel")


@register("model", "masknet")
@dataclass
class MaskNetConfig(VectorsConfig):
    """Configure MaskNet (arXiv 2102.07619), with blocks in sequence (serial), or in parallel under
    an MLP (parallel).

    serial: one block for each size of `hidden_layer_sizes`. parallel: `num_blocks` blocks of
    `block_dim` units, and the sizes are the MLP's. `layer_norm` applies to the blocks. The defaults
    are those that BARS (arXiv 2205.09626) found best on most of its data sets. The paper also
    normalizes the features' vectors (`feature_norm`).
    """

    kind: str = "masknet"
    dropout: float = 0.2
    layer_norm: bool = True
    variant: str = "serial"
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])
    num_blocks: int = 3
    block_dim: int = 64
    reduction: float = 1.0
    feature_norm: bool = False

    @property
    def table_init(self) -> InitConfig:
        """Start almost at 0.

        The norms of features and blocks scale the vectors up, including the noise of rare ids.
        """
        return InitConfig("normal", 0.0001)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.variant", self.variant, MASKNET_VARIANTS)
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes)
        check_at_least("model.num_blocks", self.num_blocks, 1)
        check_at_least("model.block_dim", self.block_dim, 1)
        check_above("model.reduction", self.reduction, 0.0)

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        from pipeline.extras.models.layers.masks import MaskedFeatures, ParallelMasks, SerialMasks
        from pipeline.models.layers.mlp import MLP

        sizes, settings = self.hidden_layer_sizes, self.layer_settings
        blocks: nn.Module
        if self.variant == "serial":
            blocks = SerialMasks(inputs.width, sizes, self.reduction, settings)
            over = MLP(sizes[-1], [], out_features=1)
        else:
            blocks = ParallelMasks(inputs.width, self.num_blocks, self.block_dim, self.reduction, settings)
            over = MLP(self.num_blocks * self.block_dim, sizes, replace(settings, layer_norm=False), out_features=1)
        return MaskedFeatures(inputs, dim, blocks, over, self.feature_norm)
