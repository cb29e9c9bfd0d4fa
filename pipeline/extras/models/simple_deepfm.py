"""Define TorchRec's model with the name DeepFM, for runs of earlier releases (stdlib only; layers import torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.embeddings.table import Table
from pipeline.models.checks import check_one_dim
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    from torch import nn


@register("model", "simple_deepfm")
@dataclass
class SimpleDeepFMConfig(ModelConfig):
    """Configure torchrec.models.deepfm.SimpleDeepFMNN; the paper's model is `deepfm`.

    A saved run with SimpleDeepFMConfig under the name `deepfm` is read as this model.
    """

    kind: str = "simple_deepfm"
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
                "model=simple_deepfm needs dense features, and the data set has none; use "
                "model=deepfm, "
                "or map dense columns in data.columns"
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
        # TorchRec ends the model in a sigmoid. The task needs logits, because their loss is stable
        # in the tails.
        model.over_arch.model = model.over_arch.model[0]
        return model
