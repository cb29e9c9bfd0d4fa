"""Logistic regression, FM and Wide&Deep, which begin with linear weights (stdlib only; layers import torch).

FM and Wide&Deep keep an id's linear weight in the last column of its row, beside its vector: one table a feature, one lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_layer_sizes, check_least_dim, check_one_dim, dims_of_features

if TYPE_CHECKING:
    from torch import nn


@register("model", "logistic_regression")
@dataclass
class LogisticRegressionConfig(ModelConfig):
    """A weight an id, a weight a dense feature, a bias.

    The weight of an id is the sum of its row: sharded tables are 4 columns wide at least, data_parallel ones may be 1.
    """

    kind: str = "logistic_regression"

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.linear import LogisticRegression

        return LogisticRegression(build_embeddings(tables), num_dense_features)


@register("model", "fm")
@dataclass
class FMConfig(ModelConfig):
    """Factorisation machine of second order (Rendle, ICDM 2010); dense features take part, scaled by their values."""

    kind: str = "fm"

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        check_one_dim(tables)
        check_least_dim(tables, 2, "FM keeps a vector of embedding_dim - 1 and a linear weight in a row")

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.linear import FactorizationMachine

        dims = dims_of_features(tables)
        dim = next(iter(dims.values()))
        return FactorizationMachine(build_embeddings(tables), list(dims), dim, num_dense_features)


@register("model", "wide_deep")
@dataclass
class WideDeepConfig(ModelConfig):
    """Wide&Deep (arXiv 1606.07792): linear weights of ids and dense features beside an MLP over their vectors.

    Tables may differ in embedding_dim: the MLP takes the vectors one after the other.
    """

    kind: str = "wide_deep"
    hidden_layer_sizes: list[int] = field(default_factory=lambda: [256, 128])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.hidden_layer_sizes", self.hidden_layer_sizes)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        check_least_dim(tables, 2, "Wide&Deep keeps a vector of embedding_dim - 1 and a linear weight in a row")

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.linear import WideDeep

        hidden = list(self.hidden_layer_sizes)
        return WideDeep(build_embeddings(tables), dims_of_features(tables), num_dense_features, hidden)
