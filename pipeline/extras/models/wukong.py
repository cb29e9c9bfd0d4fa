"""Define Wukong: stacked factorization machines (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import InitConfig
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_layer_sizes
from pipeline.models.vectors import VectorsConfig
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs


@register("model", "wukong")
@dataclass
class WukongConfig(VectorsConfig):
    """Configure Wukong (arXiv 2403.02545): layers that map vectors to vectors, and an MLP over the
    last vectors.

    A layer has a factorization machine with an MLP, which gives `num_fm_vectors` vectors, and
    linear sums of its input vectors, which are `num_linear_vectors` vectors. rank: the vectors are
    multiplied with this number of learnt sums of themselves, instead of with each other.
    `batch_norm` and `layer_norm` apply to the last MLP.
    """

    kind: str = "wukong"
    dropout: float = 0.2
    batch_norm: bool = True
    num_layers: int = 3
    num_fm_vectors: int = 40
    num_linear_vectors: int = 40
    rank: int = 8
    fm_layer_sizes: list[int] = field(default_factory=lambda: [512, 256])
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [512, 256])

    @property
    def table_init(self) -> InitConfig:
        """Start almost at 0. Otherwise the norms of the layers scale up the noise of rare ids."""
        return InitConfig("normal", 0.0001)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.fm_layer_sizes", self.fm_layer_sizes, least=0)
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes, least=0)
        for key in ("num_layers", "num_fm_vectors", "num_linear_vectors", "rank"):
            check_at_least(f"model.{key}", getattr(self, key), 1)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        super().check_tables(tables, num_dense_features)
        if self.dense_features == "values" and num_dense_features:
            raise ConfigError(
                f"model.dense_features=values, but model=wukong reads vectors only, and the data set has "
                f"{num_dense_features} dense features; set model.dense_features=vectors"
            )

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        from pipeline.extras.models.layers.wukong import FactorizationBlock, StackedVectors, WukongLayer
        from pipeline.models.layers.mlp import MLP

        settings = replace(self.layer_settings, batch_norm=False, layer_norm=False)
        num_vectors, layers = inputs.num_vectors, []
        for _ in range(self.num_layers):
            mlp = MLP(num_vectors * self.rank, self.fm_layer_sizes, settings, self.num_fm_vectors * dim)
            block = FactorizationBlock(num_vectors, self.rank, dim, mlp)
            layers.append(WukongLayer(num_vectors, self.num_fm_vectors, self.num_linear_vectors, block))
            num_vectors = self.num_fm_vectors + self.num_linear_vectors
        over = MLP(num_vectors * dim, self.hidden_layer_sizes, self.layer_settings, out_features=1)
        return StackedVectors(inputs, layers, over)
