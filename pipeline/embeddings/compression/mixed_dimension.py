"""Turn rows of few columns into rows of all: rare ids have narrow rows and a projection for their block (arXiv 1909.11810)."""

from __future__ import annotations

import math

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.embeddings.compression.composer import Composer, Pooled, mean_if_asked, sum_of_lengths
from pipeline.embeddings.compression.physical import feature_of
from pipeline.embeddings.compression.sizes import blocks_of
from pipeline.embeddings.table import Table


class MixedDimension(Composer):
    """Row of an id: its block's row, times the block's projection [block's columns, D] where it is narrower than D.

    Linear, so a bag's rows are pooled before they are projected.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._parts = [f"block_{index}" for index in range(len(blocks_of(table)))]
        self.projections = nn.ParameterDict(
            {
                part: torch.randn(block.dim, table.embedding_dim) / math.sqrt(block.dim)
                for part, block in zip(self._parts, blocks_of(table), strict=True)
                if block.dim < table.embedding_dim
            }
        )

    def forward(self, pooled: Pooled, features: KeyedJaggedTensor, index: int) -> torch.Tensor:
        names = [feature_of(self.table.feature_names[index], part) for part in self._parts]
        columns = [
            pooled[name] @ self.projections[part] if part in self.projections else pooled[name]
            for name, part in zip(names, self._parts, strict=True)
        ]
        return mean_if_asked(self.table, sum(columns[1:], columns[0]), lambda: sum_of_lengths(features, names))
