"""Models that do not read a part of their inputs, as faults to be found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.config.model import ModelConfig
from pipeline.config.registry import register
from pipeline.embeddings.collection import build_embeddings


class Deaf(nn.Module):
    """Learns from the ids if `reads_ids`, otherwise only the label rate."""

    def __init__(self, tables: list[Any], reads_ids: bool) -> None:
        super().__init__()
        self.embeddings, self.reads_ids = build_embeddings(tables), reads_ids
        self.over = nn.Linear(sum(table.embedding_dim * len(table.feature_names) for table in tables), 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: Any) -> torch.Tensor:
        pooled = self.embeddings(sparse_features)
        inputs = torch.cat([pooled[key] for key in sorted(pooled.keys())], dim=1)
        return self.over(inputs if self.reads_ids else 0.0 * inputs)


@register("model", "deaf")
@dataclass
class DeafConfig(ModelConfig):
    kind: str = "deaf"

    def build(self, tables: list[Any], num_dense_features: int) -> nn.Module:
        return Deaf(tables, reads_ids=False)


@register("model", "half_deaf")
@dataclass
class HalfDeafConfig(ModelConfig):
    kind: str = "half_deaf"

    def build(self, tables: list[Any], num_dense_features: int) -> nn.Module:
        return Deaf(tables, reads_ids=True)
