"""Define logistic regression, FM and Wide&Deep (stdlib only; layers import torch).

FM and Wide&Deep store an id's linear weight in the last column of its row, next to its vector, so
that a feature needs one table and one lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.model import DeepConfig, ModelConfig
from pipeline.config.registry import register
from pipeline.config.tables import InitConfig
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_least_dim, check_one_dim, dims_of_features
from pipeline.models.vectors import DENSE_FEATURES, DIM_WITHOUT_TABLES
from pipeline.runtime.errors import check_above, check_choice

if TYPE_CHECKING:
    from torch import nn


@register("model", "logistic_regression")
@dataclass
class LogisticRegressionConfig(ModelConfig):
    """Configure logistic regression. The weight of an id is the sum of the id's row.

    Sharded tables have at least 4 columns; data_parallel tables may have 1.
    """

    kind: str = "logistic_regression"

    @property
    def table_init(self) -> InitConfig:
        """Start near 0. Otherwise small tables would start with large random scores."""
        return InitConfig("normal", 0.001)

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.linear import LogisticRegression

        return LogisticRegression(build_embeddings(tables), num_dense_features)


@register("model", "fm")
@dataclass
class FMConfig(ModelConfig):
    """Configure a factorization machine of second order (Rendle, ICDM 2010).

    dense_features: "vectors": each is a learnt vector times its value; "values": each is a linear
    term. linear_scale: as in DeepFM.
    """

    kind: str = "fm"
    dense_features: str = "vectors"
    linear_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above("model.linear_scale", self.linear_scale, 0.0)
        check_choice("model.dense_features", self.dense_features, DENSE_FEATURES)

    @property
    def table_init(self) -> InitConfig:
        """Start near 0. Pairs of vectors take effect when the vectors have grown."""
        return InitConfig("normal", 0.001)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        if tables:
            check_one_dim(tables)
        check_least_dim(tables, 2, "FM stores a vector of embedding_dim - 1 and a linear weight in a row")

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.features import RowsModel
        from pipeline.models.layers.fm import PairTerms

        dims = dims_of_features(tables)
        dim = next(iter(dims.values()), DIM_WITHOUT_TABLES)
        over_arch = PairTerms(num_dense_features, dim - 1, self.dense_features == "vectors", self.linear_scale)
        return RowsModel(build_embeddings(tables), list(dims), dim, over_arch)


@register("model", "wide_deep")
@dataclass
class WideDeepConfig(DeepConfig):
    """Configure Wide&Deep (arXiv 1606.07792): linear weights plus an MLP over vectors.

    Tables may differ in embedding_dim, because the MLP takes the concatenated vectors.
    """

    kind: str = "wide_deep"
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [256, 128])

    @property
    def table_init(self) -> InitConfig:
        """Start with small weights for any number of rows, as all models over vectors do."""
        return InitConfig("normal", 0.01)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        check_least_dim(tables, 2, "Wide&Deep stores a vector of embedding_dim - 1 and a linear weight in a row")

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.linear import WideDeep

        hidden = list(self.hidden_layer_sizes)
        dims = dims_of_features(tables)
        return WideDeep(build_embeddings(tables), dims, num_dense_features, hidden, self.layer_settings)
