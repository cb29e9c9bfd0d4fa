"""DLRM, DLRM_DCN and DeepFM: their sizes, checked against the tables (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_layer_sizes, check_one_dim
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    from torch import nn


@register("model", "dlrm")
@dataclass
class DLRMConfig(ModelConfig):
    """DLRM with dot interaction (arXiv 1906.00091); layer sizes as torchrec.models.dlrm.DLRM takes them."""

    kind: str = "dlrm"
    dense_arch_layer_sizes: list[int] = field(default_factory=lambda: [512, 256, 64])
    over_arch_layer_sizes: list[int] = field(default_factory=lambda: [512, 512, 256, 1])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_sizes("model.dense_arch_layer_sizes", self.dense_arch_layer_sizes)
        check_layer_sizes("model.over_arch_layer_sizes", self.over_arch_layer_sizes, least=2)
        if self.over_arch_layer_sizes[-1] != 1:
            raise ConfigError(
                f"model.over_arch_layer_sizes={self.over_arch_layer_sizes} must end in 1: one logit a sample"
            )

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        dim = check_one_dim(tables)
        if self.dense_arch_layer_sizes[-1] != dim:
            raise ConfigError(
                f"model.dense_arch_layer_sizes ends in {self.dense_arch_layer_sizes[-1]} but the tables' embedding_dim "
                f"is {dim}, and the interaction needs them equal; end the list in {dim}, or set tables.default.embedding_dim"
            )
        if num_dense_features == 0:
            raise ConfigError(
                "DLRM needs dense features and the data set has none; use model=wide_deep or fm, or map dense columns"
            )

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.models.layers.dlrm import DotDLRM

        return DotDLRM(**self._arguments(tables, num_dense_features))

    def _arguments(self, tables: list[Table], num_dense_features: int) -> dict[str, Any]:
        from pipeline.embeddings.collection import build_embeddings

        return {
            "embedding_bag_collection": build_embeddings(tables),
            "dense_in_features": num_dense_features,
            "dense_arch_layer_sizes": list(self.dense_arch_layer_sizes),
            "over_arch_layer_sizes": list(self.over_arch_layer_sizes),
        }


@register("model", "dlrm_dcn")
@dataclass
class DLRMDCNConfig(DLRMConfig):
    """DLRM with a low-rank cross network (DCNv2, arXiv 2008.13535), the MLPerf DLRMv2 model."""

    kind: str = "dlrm_dcn"
    dcn_num_layers: int = 3
    dcn_low_rank_dim: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.dcn_num_layers", self.dcn_num_layers, 1)
        check_at_least("model.dcn_low_rank_dim", self.dcn_low_rank_dim, 1)

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from pipeline.models.layers.dlrm import CrossDLRM

        return CrossDLRM(
            **self._arguments(tables, num_dense_features),
            dcn_num_layers=self.dcn_num_layers,
            dcn_low_rank_dim=self.dcn_low_rank_dim,
        )


@register("model", "deepfm")
@dataclass
class DeepFMConfig(ModelConfig):
    """DeepFM (arXiv 1703.04247) as torchrec.models.deepfm.SimpleDeepFMNN."""

    kind: str = "deepfm"
    hidden_layer_size: int = 128
    deep_fm_dimension: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("model.hidden_layer_size", self.hidden_layer_size, 1)
        check_at_least("model.deep_fm_dimension", self.deep_fm_dimension, 1)

    def check_tables(self, tables: list[Table], num_dense_features: int) -> None:
        check_one_dim(tables)
        if num_dense_features == 0:
            raise ConfigError(
                "DeepFM needs dense features and the data set has none; map dense columns in data.columns"
            )

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        from torchrec.models.deepfm import SimpleDeepFMNN

        from pipeline.embeddings.collection import build_embeddings

        model = SimpleDeepFMNN(
            num_dense_features=num_dense_features,
            embedding_bag_collection=build_embeddings(tables),
            hidden_layer_size=self.hidden_layer_size,
            deep_fm_dimension=self.deep_fm_dimension,
        )
        # TorchRec ends the model in a sigmoid; the task wants logits, whose loss is stable in the tails.
        model.over_arch.model = model.over_arch.model[0]
        return model
