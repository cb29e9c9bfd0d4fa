"""Turn base rows and buckets of ids into rows: each bucket has a small network of its own (arXiv 1909.02107, section 4.1)."""

from __future__ import annotations

import math

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.embeddings.compression.composer import Composer, Pooled, mean_if_asked, pool_rows
from pipeline.embeddings.compression.physical import feature_of, places_of
from pipeline.embeddings.compression.sizes import paths_of
from pipeline.embeddings.table import Table


class PathBased(Composer):
    """Row of an id: W2[q] relu(W1[q] base[r] + b1[q]) + b2[q], of remainder r and quotient q. Batched over all ids.

    The networks are dense parameters: hidden_weight [buckets, hidden, D], output_weight [buckets, D, hidden].
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        paths, dim = paths_of(table), table.embedding_dim
        buckets, hidden = paths.num_buckets, paths.hidden_size
        # As wide as the base rows on average, so that rows are drawn with the spread that the table's init asks for.
        self.hidden_weight = nn.Parameter(torch.randn(buckets, hidden, dim) * math.sqrt(2 / dim))
        self.hidden_bias = nn.Parameter(torch.zeros(buckets, hidden))
        self.output_weight = nn.Parameter(torch.randn(buckets, dim, hidden) * math.sqrt(1 / hidden))
        self.output_bias = nn.Parameter(torch.zeros(buckets, dim))

    def forward(self, pooled: Pooled, features: KeyedJaggedTensor, index: int) -> torch.Tensor:
        feature = self.table.feature_names[index]
        names = [feature_of(feature, "remainder", place) for place in places_of(self.table, index)]
        base = torch.stack([pooled[name] for name in names], dim=1)  # [batch, places, D]
        bags = features[feature_of(feature, "bucket")]
        present = torch.arange(len(names), device=base.device) < bags.lengths().unsqueeze(1)
        rows = self._through_networks(base[present], bags.values())
        return mean_if_asked(self.table, pool_rows(rows, bags), bags.lengths)

    def _through_networks(self, base: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        """[ids, D], [ids] -> [ids, D]."""
        hidden = torch.baddbmm(
            self.hidden_bias.index_select(0, buckets).unsqueeze(2),
            self.hidden_weight.index_select(0, buckets), base.unsqueeze(2),
        )  # fmt: skip
        output = torch.baddbmm(
            self.output_bias.index_select(0, buckets).unsqueeze(2),
            self.output_weight.index_select(0, buckets), torch.relu(hidden),
        )  # fmt: skip
        return output.squeeze(2)
