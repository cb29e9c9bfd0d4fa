"""Define models of the affinity of users and items: matrix factorization, NCF and two towers
(stdlib only; layers import torch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.config.model import LayersConfig, ModelConfig
from pipeline.config.registry import register
from pipeline.embeddings.table import Table
from pipeline.extras.models.retrievers import RetrieverConfig
from pipeline.extras.models.roles import check_features
from pipeline.models.checks import check_layer_sizes, check_least_dim, check_one_dim, dims_of_features
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice

NCF_VARIANTS = ("gmf", "mlp", "neumf")

if TYPE_CHECKING:
    from torch import nn


@dataclass
class UserItemConfig(ModelConfig):
    """Configure a model with one user feature and one item feature.

    It does not read the other features of the data set.
    """

    user_feature: str = "user_id"
    item_feature: str = "item_id"

    @property
    def used_features(self) -> list[str]:
        return [self.user_feature, self.item_feature]

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        roles = [("model.user_feature", self.user_feature), ("model.item_feature", self.item_feature)]
        check_features(roles, tables)
        used = [table for table in tables if set(self.used_features) & set(table.feature_names)]
        check_one_dim(used)
        self.check_dim(used)

    def check_dim(self, tables: list[Table]) -> None:
        """Check that the tables share one embedding_dim."""


@register("model", "matrix_factorization")
@dataclass
class MatrixFactorizationConfig(UserItemConfig):
    """Configure matrix factorization: the sigmoid of user . item and a bias of each (Koren et al.,
    2009).
    """

    kind: str = "matrix_factorization"

    def check_dim(self, tables: list[Table]) -> None:
        check_least_dim(tables, 2, "matrix factorization stores a vector of embedding_dim - 1 and a bias in a row")

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.extras.models.layers.user_item import BiasedDot, UserItemModel

        return UserItemModel(build_embeddings(tables), self.user_feature, self.item_feature, BiasedDot())


@register("model", "ncf")
@dataclass
class NCFConfig(UserItemConfig, LayersConfig):
    """Configure neural collaborative filtering (arXiv 1708.05031).

    gmf: a weighted product of the two vectors. mlp: layers over both vectors. neumf: both, with
    separate vectors: GMF uses the first `gmf_dim` columns of a row (None: half of them), and the
    MLP uses the other columns.
    """

    kind: str = "ncf"
    variant: str = "neumf"
    mlp_layer_sizes: list[int] = field(default_factory=lambda: [64, 32, 16])
    gmf_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("model.variant", self.variant, NCF_VARIANTS)
        check_layer_sizes("model.mlp_layer_sizes", self.mlp_layer_sizes)
        check_at_least("model.gmf_dim", self.gmf_dim, 1, allow_none=True)
        if self.gmf_dim is not None and self.variant != "neumf":
            raise ConfigError(
                f"model.gmf_dim={self.gmf_dim} needs model.variant=neumf; {self.variant} uses all columns of a row"
            )

    def gmf_columns(self, embedding_dim: int) -> int:
        """Return how many columns of a row GMF uses. The MLP uses the other columns."""
        if self.variant == "neumf":
            return embedding_dim // 2 if self.gmf_dim is None else self.gmf_dim
        return embedding_dim if self.variant == "gmf" else 0

    def check_dim(self, tables: list[Table]) -> None:
        if self.variant == "neumf":
            check_least_dim(
                tables, (self.gmf_dim or 1) + 1, "NeuMF gives some columns of a row to GMF and the rest to the MLP"
            )

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.extras.models.layers.user_item import NeuralFiltering, UserItemModel

        dim = dims_of_features(tables)[self.user_feature]
        over_arch = NeuralFiltering(dim, self.gmf_columns(dim), list(self.mlp_layer_sizes), self.layer_settings)
        return UserItemModel(build_embeddings(tables), self.user_feature, self.item_feature, over_arch)


@register("model", "two_tower")
@dataclass
class TwoTowerConfig(RetrieverConfig, LayersConfig):
    """Configure a user's and an item's tower whose dot product ranks items (Yi et al., RecSys
    2019).

    `item_features[0]` names the item. Dense features are inputs of the user's tower, because they
    describe the request.
    """

    kind: str = "two_tower"
    user_features: list[str] = field(default_factory=lambda: ["user_id"])
    item_features: list[str] = field(default_factory=lambda: ["item_id"])
    user_layer_sizes: list[int] = field(default_factory=lambda: [64, 32])
    item_layer_sizes: list[int] = field(default_factory=lambda: [64, 32])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.user_layer_sizes", self.user_layer_sizes)
        check_layer_sizes("model.item_layer_sizes", self.item_layer_sizes)
        if self.user_layer_sizes[-1] != self.item_layer_sizes[-1]:
            raise ConfigError(
                f"model.user_layer_sizes ends in {self.user_layer_sizes[-1]} and model.item_layer_sizes in "
                f"{self.item_layer_sizes[-1]}, but a score is the dot product of both outputs; "
                "end both lists with the same size"
            )
        for name, features in (("user", self.user_features), ("item", self.item_features)):
            if not features:
                raise ConfigError(f"model.{name}_features is empty: name at least one feature")

    @property
    def task(self) -> str:
        return "retrieval"

    @property
    def used_features(self) -> list[str]:
        return [*self.user_features, *self.item_features]

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        roles = [("model.user_features", name) for name in self.user_features]
        check_features([*roles, *(("model.item_features", name) for name in self.item_features)], tables)
        self.check_items(self.item_features[0], tables)

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.extras.models.layers.two_tower import TwoTower

        return TwoTower(
            build_embeddings(tables),
            dims_of_features(tables),
            list(self.user_features),
            list(self.item_features),
            list(self.user_layer_sizes),
            list(self.item_layer_sizes),
            num_dense_features,
            self.normalize,
            self.layer_settings,
        )
