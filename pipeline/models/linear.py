"""Logistic regression, FM and Wide&Deep, which begin with linear weights (stdlib only; layers import torch).

FM and Wide&Deep keep an id's linear weight in the last column of its row, beside its vector: one table a feature, one lookup.
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
    """A weight an id, a weight a dense feature, a bias.

    The weight of an id is the sum of its row: sharded tables are 4 columns wide at least, data_parallel ones may be 1.
    """

    kind: str = "logistic_regression"

    @property
    def table_init(self) -> InitConfig:
        """Weights near 0: by 1/sqrt(rows), ids of small tables would begin with scores of their own."""
        return InitConfig("normal", 0.001)

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.linear import LogisticRegression

        return LogisticRegression(build_embeddings(tables), num_dense_features)


@register("model", "fm")
@dataclass
class FMConfig(ModelConfig):
    """Factorisation machine of second order (Rendle, ICDM 2010).

    dense_features: "vectors": a dense feature is a learnt vector times its value; "values": a linear term alone.
    linear_scale: as deepfm's.
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
        """As logistic regression's; pairs of vectors take part when they have grown."""
        return InitConfig("normal", 0.001)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        if tables:
            check_one_dim(tables)
        check_least_dim(tables, 2, "FM keeps a vector of embedding_dim - 1 and a linear weight in a row")

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
    """Wide&Deep (arXiv 1606.07792): linear weights of ids and dense features beside an MLP over their vectors.

    Tables may differ in embedding_dim: the MLP takes the vectors one after the other.
    """

    kind: str = "wide_deep"
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [256, 128])

    @property
    def table_init(self) -> InitConfig:
        """Small, whatever the table's rows, as of all models over vectors."""
        return InitConfig("normal", 0.01)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        check_least_dim(tables, 2, "Wide&Deep keeps a vector of embedding_dim - 1 and a linear weight in a row")

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.linear import WideDeep

        hidden = list(self.hidden_layer_sizes)
        dims = dims_of_features(tables)
        return WideDeep(build_embeddings(tables), dims, num_dense_features, hidden, self.layer_settings)
