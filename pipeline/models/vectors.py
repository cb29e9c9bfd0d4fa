"""Define the base of models that have one vector per feature (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeline.config.model import LayersConfig
from pipeline.config.tables import InitConfig
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_least_dim, check_one_dim, dims_of_features
from pipeline.runtime.errors import ConfigError, check_above, check_choice

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.features import FeatureInputs

DENSE_FEATURES = ("vectors", "values")
DIM_WITHOUT_TABLES = 16  # the width of dense features' vectors; tables set theirs by embedding_dim


@dataclass
class VectorsConfig(LayersConfig):
    """Configure a model whose inputs are one vector per feature: [batch, num_features,
    embedding_dim].

    dense_features: "vectors": each is a learnt vector times its value; "values": the values are
    inputs only of the layers that take all columns.
    """

    num_linear_columns: ClassVar[int] = 0  # of a row, after its vector
    init: str = "xavier_normal"
    dense_features: str = "vectors"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.dense_features", self.dense_features, DENSE_FEATURES)

    @property
    def table_init(self) -> InitConfig:
        """Start with small weights. With 1/sqrt(rows), small tables would outweigh all others."""
        return InitConfig("normal", 0.01)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        if tables:
            check_one_dim(tables)
        elif not num_dense_features:
            raise ConfigError(
                f"model={self.kind} has no feature to read: the data set has 0 sparse and 0 dense features"
            )

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.features import FeatureInputs, RowsModel

        dims = dims_of_features(tables)
        dim = next(iter(dims.values()), DIM_WITHOUT_TABLES)
        width = dim - self.num_linear_columns
        inputs = FeatureInputs(len(dims), num_dense_features, width, self.dense_features == "vectors")
        return RowsModel(build_embeddings(tables), list(dims), dim, self.build_over_arch(inputs, list(dims), dim))

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        """Return a module: (dense [B, num_dense], rows [B, F, dim]) -> logits [B, 1]."""
        raise NotImplementedError(f"{type(self).__name__} has no build_over_arch()")


@dataclass
class LinearVectorsConfig(VectorsConfig):
    """Configure a model with an id's linear weight in the last column of its row.

    linear_scale: factor of the linear weights in the logit. A table has only one L2 penalty
    (tables.*.l2). With a factor of 3 and nine times the penalty, the linear weights are penalized
    as before, but the vectors of rare ids are nearer to 0.
    """

    num_linear_columns: ClassVar[int] = 1
    linear_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above("model.linear_scale", self.linear_scale, 0.0)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        super().check_tables(tables, num_dense_features)
        check_least_dim(
            tables, 2, f"model={self.kind} stores a vector of embedding_dim - 1 and a linear weight in a row"
        )

    def build_over_arch(self, inputs: FeatureInputs, feature_names: list[str], dim: int) -> nn.Module:
        return self.build_logits(inputs, inputs.num_dense_features)

    def build_logits(self, inputs: FeatureInputs, num_dense_features: int) -> nn.Module:
        """Return a module: (dense [B, num_dense], rows [B, F, embedding_dim]) -> logits [B, 1]."""
        raise NotImplementedError(f"{type(self).__name__} has no build_logits()")
