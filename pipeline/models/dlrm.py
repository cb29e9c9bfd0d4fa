"""Define DLRM and DLRM_DCN, and check their sizes (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.model import LayersConfig
from pipeline.config.registry import register
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_layer_sizes, check_one_dim, dims_of_features
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    from torch import nn

    from pipeline.models.layers.dlrm import CrossedRows
    from pipeline.models.layers.interaction import DotInteraction


@register("model", "dlrm")
@dataclass
class DLRMConfig(LayersConfig):
    """Configure DLRM with dot interaction (arXiv 1906.00091), with TorchRec's layer sizes.

    dense_arch_layer_sizes: the last size is the tables' embedding_dim; None: 512, 256 and
    embedding_dim. Without dense features the interaction uses the tables only.
    """

    kind: str = "dlrm"
    dense_arch_layer_sizes: list[int] | None = None
    over_arch_layer_sizes: list[int] = field(default_factory=lambda: [512, 512, 256, 1])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_arch_layer_sizes is not None:
            check_layer_sizes("model.dense_arch_layer_sizes", self.dense_arch_layer_sizes)
        check_layer_sizes("model.over_arch_layer_sizes", self.over_arch_layer_sizes, least=2)
        if self.over_arch_layer_sizes[-1] != 1:
            raise ConfigError(
                f"model.over_arch_layer_sizes={self.over_arch_layer_sizes} must end in 1: one logit per sample"
            )

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        num_features = len(dims_of_features(tables))
        if not tables or (num_dense_features == 0 and num_features < 2):
            raise ConfigError(
                f"model={self.kind} makes pairs of tables' and dense features' vectors, and the data set has {num_features} "
                f"sparse and {num_dense_features} dense features; use model=wide_deep or logistic_regression"
            )
        dim, sizes = check_one_dim(tables), self.dense_arch_layer_sizes
        if num_dense_features and sizes is not None and sizes[-1] != dim:
            raise ConfigError(
                f"model.dense_arch_layer_sizes ends in {sizes[-1]} but the tables' embedding_dim is {dim}, and the "
                f"interaction needs them equal; end the list in {dim}, set tables.default.embedding_dim, or leave the list out"
            )

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.models.layers.dlrm import DotDLRM
        from pipeline.models.layers.interaction import DotInteraction

        if num_dense_features == 0:
            num_features = len(dims_of_features(tables))
            return self._without_dense(tables, DotInteraction(num_features, has_dense=False))
        return DotDLRM(**self._arguments(tables, num_dense_features))

    def _without_dense(self, tables: list[Table], inter_arch: DotInteraction | CrossedRows) -> nn.Module:
        from pipeline.embeddings.collection import build_embeddings
        from pipeline.models.layers.dlrm import SparseDLRM

        names, sizes = list(dims_of_features(tables)), list(self.over_arch_layer_sizes)
        return SparseDLRM(build_embeddings(tables), names, inter_arch, sizes, self.layer_settings)

    def _arguments(self, tables: list[Table], num_dense_features: int) -> dict[str, Any]:
        from pipeline.embeddings.collection import build_embeddings

        sizes = self.dense_arch_layer_sizes
        return {
            "settings": self.layer_settings,
            "embedding_bag_collection": build_embeddings(tables),
            "dense_in_features": num_dense_features,
            "dense_arch_layer_sizes": [512, 256, tables[0].embedding_dim] if sizes is None else list(sizes),
            "over_arch_layer_sizes": list(self.over_arch_layer_sizes),
        }


@register("model", "dlrm_dcn")
@dataclass
class DLRMDCNConfig(DLRMConfig):
    """Configure DLRM with a low-rank cross network (arXiv 2008.13535), as in MLPerf's DLRMv2."""

    kind: str = "dlrm_dcn"
    dcn_num_layers: int = 3
    dcn_low_rank_dim: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.dcn_num_layers", self.dcn_num_layers, 1)
        check_at_least("model.dcn_low_rank_dim", self.dcn_low_rank_dim, 1)

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.models.layers.dlrm import CrossDLRM, CrossedRows

        layers, rank = self.dcn_num_layers, self.dcn_low_rank_dim
        if num_dense_features == 0:
            width = sum(dims_of_features(tables).values())
            return self._without_dense(tables, CrossedRows(width, layers, rank))
        return CrossDLRM(**self._arguments(tables, num_dense_features), dcn_num_layers=layers, dcn_low_rank_dim=rank)
