"""Define FinalNet: blocks of factorized interaction layers instead of MLPs (stdlib only; layers
import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.models.checks import check_layer_sizes
from pipeline.models.vectors import VectorsConfig
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs

COMBINES = ("concat", "sum")


@register("model", "finalnet")
@dataclass
class FinalNetConfig(VectorsConfig):
    """Configure FinalNet (Zhu et al., SIGIR 2023): one block of factorized interaction layers, or
    two blocks whose logits are averaged.

    A layer computes h = W x + b and the products h * (V x + c), and then combines them: "concat",
    half of the layer's columns each, as in the authors' code; "sum", as in the paper.
    feature_gates: the first block also reads the vectors, each times a linear map of all vectors.
    distillation: the weight of a loss that trains the probability of each block towards the
    probability of the model.
    """

    kind: str = "finalnet"
    activation: str = "identity"
    dropout: float = 0.2
    batch_norm: bool = True
    first_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])
    second_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])
    combine: str = "concat"
    feature_gates: bool = True
    distillation: float = 1.0

    @property
    def task(self) -> str:
        """Return the task that also trains each block. With one block the logits are equal."""
        return "distilled_streams" if self.distillation and self.second_layer_sizes else "click"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.first_layer_sizes", self.first_layer_sizes)
        check_layer_sizes("model.second_layer_sizes", self.second_layer_sizes, least=0)
        check_choice("model.combine", self.combine, COMBINES)
        check_at_least("model.distillation", self.distillation, 0.0)
        odd = [size for size in [*self.first_layer_sizes, *self.second_layer_sizes] if size % 2]
        if odd and self.combine == "concat":
            raise ConfigError(
                f"model.combine=concat splits the columns of a layer into 2 halves, and {odd[0]} is odd; "
                "use even sizes in model.first_layer_sizes and model.second_layer_sizes, or set model.combine=sum"
            )

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        from pipeline.extras.models.layers.factorized import FactorizedBlock, FactorizedStreams, VectorGates

        gates = VectorGates(inputs.num_vectors) if self.feature_gates and inputs.num_vectors else None
        width = inputs.width + (inputs.num_vectors * dim if gates else 0)
        first, second = (
            FactorizedBlock(in_features, sizes, self.combine == "concat", self.layer_settings) if sizes else None
            for in_features, sizes in ((width, self.first_layer_sizes), (inputs.width, self.second_layer_sizes))
        )
        assert first is not None
        return FactorizedStreams(inputs, gates, first, second, trains_each=self.task != "click")
