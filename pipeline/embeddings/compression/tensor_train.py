"""Turn ids into rows of a table that is a product of three small cores (TT-Rec, arXiv 2101.11714)."""

from __future__ import annotations

import math

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.embeddings.compression.composer import Composer, Pooled, mean_if_asked, pool_rows
from pipeline.embeddings.compression.physical import feature_of, row_std
from pipeline.embeddings.compression.sizes import tensor_train_of
from pipeline.embeddings.table import Table

# Where the first two cores have no more pairs, one product of all of them costs less than one for each id of a batch.
MAX_PAIRS = 4096
LEAST = 2.0  # standard deviations; TT-Rec leaves out what is nearer to zero


class TensorTrainEmbedding(Composer):
    """Row of id (i1, i2, i3), the digits of the id: first[i1] second[i2] third[i3], reshaped to [D].

    first [n1, d1, r], second [n2, r, d2 r], third [n3, r, d3], all dense parameters, a copy on every rank. Rows are made
    for the ids of the batch alone, by batched matrix products, and so are their gradients.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        train = tensor_train_of(table)
        (n1, n2, n3), (d1, d2, d3), rank = train.rows, train.dims, train.rank
        self._rows, self._dim, self._inner_dim = train.rows, table.embedding_dim, d1 * d2
        # The product of a row's cores is a sum of rank^2 terms, each of three numbers.
        std = (row_std(table) / rank) ** (1 / 3)
        self.first = nn.Parameter(away_from_zero(n1, d1, rank) * std)
        self.second = nn.Parameter(away_from_zero(n2, rank, d2 * rank) * std)
        self.third = nn.Parameter(away_from_zero(n3, rank, d3) * std)

    def forward(self, pooled: Pooled, features: KeyedJaggedTensor, index: int) -> torch.Tensor:
        bags = features[feature_of(self.table.feature_names[index], "cores")]
        return mean_if_asked(self.table, pool_rows(self.rows_of(bags.values()), bags), bags.lengths)

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """[ids] -> [ids, D]."""
        n1, n2, n3 = self._rows
        pairs = self._products_of_all(ids // n3) if n1 * n2 <= MAX_PAIRS else self._products(ids // n3)
        rows = torch.bmm(pairs, self.third.index_select(0, ids % n3))
        return rows.reshape(-1, self._dim)

    def _products(self, pairs: torch.Tensor) -> torch.Tensor:
        """[ids] of (i1, i2) -> [ids, d1 d2, r]."""
        _, n2, _ = self._rows
        first, second = self.first.index_select(0, pairs // n2), self.second.index_select(0, pairs % n2)
        # Said in full, for what a batch without ids leaves out cannot be inferred.
        return torch.bmm(first, second).reshape(first.shape[0], self._inner_dim, first.shape[2])

    def _products_of_all(self, pairs: torch.Tensor) -> torch.Tensor:
        n1, n2, _ = self._rows
        _, d1, rank = self.first.shape
        # [n1 d1, r] times [r, n2 d2 r]
        products = self.first.reshape(n1 * d1, rank) @ self.second.transpose(0, 1).reshape(rank, -1)
        each = products.view(n1, d1, n2, -1).transpose(1, 2).reshape(n1 * n2, -1)
        return each.index_select(0, pairs).view(pairs.shape[0], self._inner_dim, rank)


def away_from_zero(*shape: int) -> torch.Tensor:
    """Of standard deviation 1: a normal distribution without its middle, as TT-Rec's sampled Gaussian (section 4.2).

    Sums of products of such numbers come nearest to the uniform distribution that embedding tables are drawn from.
    """
    normal = torch.distributions.Normal(0.0, 1.0)
    tail = 1 - normal.cdf(torch.tensor(LEAST)).item()
    drawn = -torch.special.ndtri(torch.rand(shape, dtype=torch.float64).clamp(min=1e-12) * tail)
    signs = torch.randint(0, 2, shape) * 2 - 1
    density = math.exp(-(LEAST**2) / 2) / math.sqrt(2 * math.pi)
    return (drawn * signs / math.sqrt(1 + LEAST * density / tail)).float()
