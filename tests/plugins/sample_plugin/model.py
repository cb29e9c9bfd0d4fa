"""A model in one file: its config, its module and its registration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.embeddings.collection import build_embeddings
from pipeline.embeddings.table import Table


@register("model", "summed_mlp")
@dataclass
class SummedMlpConfig(ModelConfig):
    """An MLP over dense features and pooled rows."""

    kind: str = "summed_mlp"
    hidden: int = 16

    @property
    def task(self) -> str:
        return "smoothed_click"

    def build(self, tables: list[Table], num_dense_features: int) -> nn.Module:
        return SummedMlp(build_embeddings(tables), tables, num_dense_features, self.hidden)


class SummedMlp(nn.Module):
    """forward(dense_features [B, num_dense], sparse_features) -> logits [B, 1]"""

    def __init__(self, embeddings: nn.Module, tables: list[Table], num_dense_features: int, hidden: int) -> None:
        super().__init__()
        self.embedding_bag_collection = embeddings
        self.features = [feature for table in tables for feature in table.feature_names]
        width = num_dense_features + sum(table.embedding_dim * len(table.feature_names) for table in tables)
        self.layers = nn.Sequential(MLP(width, [hidden]), nn.Linear(hidden, 1))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.embedding_bag_collection(sparse_features)
        rows = [pooled[feature] for feature in self.features]
        logits: torch.Tensor = self.layers(torch.cat([dense_features, *rows], dim=1))
        return logits
