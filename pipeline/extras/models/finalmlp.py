"""Define FinalMLP: two MLPs with separate gates over the features, and a bilinear fusion (stdlib
only; layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.embeddings.table import Table
from pipeline.extras.models.roles import check_features
from pipeline.models.checks import check_layer_sizes
from pipeline.models.vectors import VectorsConfig
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs


@register("model", "finalmlp")
@dataclass
class FinalMLPConfig(VectorsConfig):
    """Configure FinalMLP (arXiv 2304.00902). The gate of a stream scales each input by 0 to 2.

    A gate reads the given context features or a learnt vector. With feature_gates=false the model
    is the paper's DualMLP with bilinear fusion. Streams and gates share the vector of a context
    feature (the authors' code uses a second table). The defaults are those that BARS (arXiv
    2205.09626) found best on most of its data sets.
    """

    kind: str = "finalmlp"
    dropout: float = 0.2
    batch_norm: bool = True
    first_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])
    second_layer_sizes: list[int] = field(default_factory=lambda: [800])
    num_heads: int = 10
    feature_gates: bool = True
    gate_layer_sizes: list[int] = field(default_factory=lambda: [800])
    first_context: list[str] = field(default_factory=list)
    second_context: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.first_layer_sizes", self.first_layer_sizes)
        check_layer_sizes("model.second_layer_sizes", self.second_layer_sizes)
        check_layer_sizes("model.gate_layer_sizes", self.gate_layer_sizes, least=0)
        check_at_least("model.num_heads", self.num_heads, 1)
        for key in ("first_layer_sizes", "second_layer_sizes"):
            if (width := getattr(self, key)[-1]) % self.num_heads:
                raise ConfigError(
                    f"model.{key} ends in {width}, which is not a multiple of "
                    f"model.num_heads={self.num_heads}, and all heads take equally many columns; "
                    "choose another"
                )

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        super().check_tables(tables, num_dense_features)
        for key, context in (("first_context", self.first_context), ("second_context", self.second_context)):
            check_features([(f"model.{key}", feature) for feature in context], tables)

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        from pipeline.extras.models.layers.streams import BilinearFusion, FeatureGate, Stream, TwoStreams
        from pipeline.models.layers.mlp import MLP

        streams = []
        for sizes, context in (
            (self.first_layer_sizes, self.first_context),
            (self.second_layer_sizes, self.second_context),
        ):
            gate = None
            if self.feature_gates:
                positions = [feature_names.index(name) for name in context]
                gate = FeatureGate(positions, dim, self.gate_layer_sizes, inputs.width)
            streams.append(Stream(gate, MLP(inputs.width, sizes, self.layer_settings)))
        fusion = BilinearFusion(self.first_layer_sizes[-1], self.second_layer_sizes[-1], self.num_heads)
        return TwoStreams(inputs, streams[0], streams[1], fusion)
