"""Define the deep & cross networks DCN and DCNv2 (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import InitConfig
from pipeline.models.checks import check_layer_sizes
from pipeline.models.vectors import VectorsConfig
from pipeline.runtime.errors import check_at_least, check_choice

CROSSES = ("matrix", "low_rank", "mixture")
STRUCTURES = ("parallel", "stacked", "stacked_parallel", "cross")

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs


@register("model", "dcn")
@dataclass
class DCNConfig(VectorsConfig):
    """Configure DCN (arXiv 1708.05123): layers that cross columns by a vector, an MLP, and a linear
    layer over both.

    The defaults are those that BARS (arXiv 2205.09626) found best on most of its data sets.
    """

    kind: str = "dcn"
    dropout: float = 0.2
    batch_norm: bool = True
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])
    num_cross_layers: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes, least=0)
        check_at_least("model.num_cross_layers", self.num_cross_layers, 1)

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        from pipeline.models.layers.cross import CrossAndDeep, CrossNetwork, VectorCross
        from pipeline.models.layers.mlp import MLP

        cross = CrossNetwork([VectorCross(inputs.width) for _ in range(self.num_cross_layers)])
        sizes = self.hidden_layer_sizes
        return CrossAndDeep(inputs, cross, None, MLP(inputs.width, sizes, self.layer_settings) if sizes else None)


@register("model", "dcnv2")
@dataclass
class DCNv2Config(VectorsConfig):
    """Configure DCNv2 (arXiv 2008.13535): layers that cross columns by a matrix, and an MLP.

    cross: "matrix"; "low_rank": the matrix is a product of two matrices of `low_rank` columns;
        "mixture": `num_experts` such products with tanh between them, weighted by gates.
    structure: the input of the MLP. "parallel": the inputs; "stacked": the crosses;
        "stacked_parallel": one MLP for each; "cross": no MLP.
    The defaults are those that BARS (arXiv 2205.09626) found best on most of its data sets.
    """

    kind: str = "dcnv2"
    dropout: float = 0.2
    batch_norm: bool = True
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])
    structure: str = "parallel"
    cross: str = "matrix"
    num_cross_layers: int = 4
    low_rank: int = 32
    num_experts: int = 4

    @property
    def table_init(self) -> InitConfig:
        """Use smaller weights than for an MLP. Otherwise the crosses start with noise from rare ids."""
        return InitConfig("normal", 0.001)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes)
        check_choice("model.structure", self.structure, STRUCTURES)
        check_choice("model.cross", self.cross, CROSSES)
        check_at_least("model.num_cross_layers", self.num_cross_layers, 1)
        check_at_least("model.low_rank", self.low_rank, 1)
        check_at_least("model.num_experts", self.num_experts, 1)

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        from pipeline.models.layers.cross import CrossAndDeep, CrossNetwork
        from pipeline.models.layers.mlp import MLP

        cross = CrossNetwork([self._cross_layer(inputs.width) for _ in range(self.num_cross_layers)])
        behind, beside = (
            MLP(inputs.width, self.hidden_layer_sizes, self.layer_settings) if part in self.structure else None
            for part in ("stacked", "parallel")
        )
        return CrossAndDeep(inputs, cross, behind, beside)

    def _cross_layer(self, width: int) -> nn.Module:
        from pipeline.models.layers.cross import MatrixCross, MixtureCross

        if self.cross == "mixture":
            return MixtureCross(width, self.low_rank, self.num_experts)
        return MatrixCross(width, self.low_rank if self.cross == "low_rank" else None)
