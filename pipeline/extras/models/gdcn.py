"""Define GDCN: cross layers whose products pass through gates (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import InitConfig
from pipeline.models.dcn import DCNConfig
from pipeline.runtime.errors import check_choice

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs

GDCN_STRUCTURES = ("parallel", "stacked")


@register("model", "gdcn")
@dataclass
class GDCNConfig(DCNConfig):
    """Configure GDCN (arXiv 2311.04635): cross layers by a matrix, each with a gate, and an MLP.

    structure: the input of the MLP. "parallel" (GDCN-P): the inputs; a linear layer reads the
    outputs of the crosses and of the MLP. "stacked" (GDCN-S): the output of the crosses. Without
    layers in the MLP, the linear layer reads the crosses only.
    """

    kind: str = "gdcn"
    structure: str = "parallel"

    @property
    def table_init(self) -> InitConfig:
        """Use smaller weights than for an MLP. Otherwise the crosses start with noise from rare ids."""
        return InitConfig("normal", 0.001)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.structure", self.structure, GDCN_STRUCTURES)

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        from pipeline.extras.models.layers.gated_cross import GatedCross
        from pipeline.models.layers.cross import CrossAndDeep, CrossNetwork
        from pipeline.models.layers.mlp import MLP

        cross = CrossNetwork([GatedCross(inputs.width) for _ in range(self.num_cross_layers)])
        sizes = self.hidden_layer_sizes
        deep = MLP(inputs.width, sizes, self.layer_settings) if sizes else None
        return CrossAndDeep(inputs, cross, *((None, deep) if self.structure == "parallel" else (deep, None)))
