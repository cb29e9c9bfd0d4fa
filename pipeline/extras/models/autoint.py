"""Define AutoInt: multi-head attention between the features' vectors, with an optional MLP (stdlib
only; layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import InitConfig
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_layer_sizes
from pipeline.models.vectors import VectorsConfig
from pipeline.runtime.errors import ConfigError, check_at_least, check_below_one

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs


@register("model", "autoint")
@dataclass
class AutoIntConfig(VectorsConfig):
    """Configure AutoInt and AutoInt+ (arXiv 1810.11921): attention layers, and also an MLP if
    `hidden_layer_sizes` is set.

    The defaults are those of AutoInt+ that BARS (arXiv 2205.09626) found best on most of its data
    sets. `dropout`, `batch_norm` and `layer_norm` apply to the MLP.
    """

    kind: str = "autoint"
    dropout: float = 0.1
    batch_norm: bool = True
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [400, 400, 400])
    num_attention_layers: int = 3
    attention_dim: int = 64
    num_heads: int = 2
    attention_dropout: float = 0.0
    attention_norm: bool = True
    scale_attention: bool = True
    residual: bool = True

    @property
    def table_init(self) -> InitConfig:
        """Use smaller weights than for an MLP alone.

        Otherwise attention starts with noise from rare ids.
        """
        return InitConfig("normal", 0.001)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes, least=0)
        check_at_least("model.num_attention_layers", self.num_attention_layers, 1)
        check_at_least("model.attention_dim", self.attention_dim, 1)
        check_at_least("model.num_heads", self.num_heads, 1)
        check_below_one("model.attention_dropout", self.attention_dropout)
        if self.attention_dim % self.num_heads:
            raise ConfigError(
                f"model.attention_dim={self.attention_dim} is not a multiple of "
                f"model.num_heads={self.num_heads}, and all heads take equally many columns; "
                "choose another"
            )

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        super().check_tables(tables, num_dense_features)
        if self.dense_features == "values" and num_dense_features and not (tables and self.hidden_layer_sizes):
            lacking = "the data set has 0 sparse features" if not tables else "model.hidden_layer_sizes=[]"
            raise ConfigError(
                f"model.dense_features=values passes {num_dense_features} dense features to the "
                f"MLP only, and {lacking}; set model.dense_features=vectors"
            )

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        from pipeline.extras.models.layers.attention import AttendedFeatures, MultiHeadInteraction
        from pipeline.models.layers.mlp import MLP

        layers = [
            MultiHeadInteraction(
                self.attention_dim if number else dim,
                self.attention_dim,
                self.num_heads,
                dropout=self.attention_dropout,
                residual=self.residual,
                scale=self.scale_attention,
                layer_norm=self.attention_norm,
            )
            for number in range(self.num_attention_layers)
        ]
        sizes = self.hidden_layer_sizes
        deep = MLP(inputs.width, sizes, self.layer_settings, out_features=1) if sizes else None
        return AttendedFeatures(inputs, layers, self.attention_dim, deep)
