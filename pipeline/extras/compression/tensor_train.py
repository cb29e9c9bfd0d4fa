"""Store a table as the product of three small cores (stdlib only; TT-Rec, arXiv 2101.11714)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.embeddings.compression.kind import CompressionKind, Split
from pipeline.embeddings.table import Table
from pipeline.extras.compression.digits import pool_rows
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DEFAULT_RANK = 16
# If the first two cores have no more pairs than this, one product of all pairs is cheaper than one
# per id.
MAX_PAIRS = 4096
LEAST = 2.0  # standard deviations; TT-Rec excludes numbers nearer to zero


@dataclass(frozen=True)
class Cores:
    """Hold the sizes of the cores: [rows[0], dims[0], rank], [rows[1], rank, dims[1], rank],
    [rows[2], rank, dims[2]].
    """

    rows: tuple[int, int, int]
    dims: tuple[int, int, int]
    rank: int

    @property
    def num_numbers(self) -> int:
        (n1, n2, n3), (d1, d2, d3), rank = self.rows, self.dims, self.rank
        return n1 * d1 * rank + n2 * rank * d2 * rank + n3 * rank * d3


@register("compression", "tensor_train")
class TensorTrain(CompressionKind):
    """Compute the row of id (i1, i2, i3), the digits of the id, as first[i1] second[i2] third[i3],
    reshaped to [D].

    first [n1, d1, r], second [n2, r, d2 r], third [n3, r, d3] are dense parameters, with a copy on
    every rank. Rows and their gradients are computed for the ids of the batch only, by batched
    matrix products.
    """

    carries_weights = True
    settings = ("ratio", "rank", "row_factors", "dim_factors")
    id_part = "cores"
    is_product = True

    @cached_property
    def cores(self) -> Cores:
        """Return the sizes of the cores.

        Raises ConfigError if factors do not cover the table, or no rank is small enough.
        """
        config, num_ids, dim = self.config, self.table.num_embeddings, self.table.embedding_dim
        rows = tuple(config.row_factors) or _factors_above(num_ids)
        dims = tuple(config.dim_factors) or _factors_of(dim)
        if len(rows) != 3 or math.prod(rows) < num_ids:
            raise ConfigError(
                f"{self.key}.row_factors={list(rows)} must be three numbers whose product covers the table's {num_ids:,} ids, e.g. "
                f"{list(_factors_above(num_ids))}"
            )
        if len(dims) != 3 or math.prod(dims) != dim:
            raise ConfigError(
                f"{self.key}.dim_factors={list(dims)} must be three numbers whose product is embedding_dim={dim}, e.g. "
                f"{list(_factors_of(dim))}"
            )
        if config.rank is not None and config.ratio is not None:
            raise ConfigError(f"{self.key}: rank and ratio both set the size; remove one")
        limit = self.budget()
        rank = config.rank or DEFAULT_RANK
        if limit is not None:
            # The largest root of n2 d2 r^2 + (n1 d1 + n3 d3) r = limit.
            square, linear = rows[1] * dims[1], rows[0] * dims[0] + rows[2] * dims[2]
            rank = int((math.sqrt(linear**2 + 4 * square * limit) - linear) / (2 * square))
            if rank < 1:
                least = Cores(rows, dims, 1).num_numbers
                raise ConfigError(
                    f"{self.key}.ratio={config.ratio:g} is more than a tensor train of {num_ids:,} x {dim} can reach, which is "
                    f"{num_ids * dim / least:.3g}; lower it, or leave such tables out with min_rows={num_ids + 1}"
                )
        return Cores(rows, dims, rank)

    def parts(self) -> list[Table]:
        return []

    def split(self, index: int) -> Split:
        feature = self.feature(index, "cores")
        return lambda bags: iter([(feature, bags)])

    def num_dense_numbers(self) -> int:
        return self.cores.num_numbers

    def describe_dense(self, count: int) -> str:
        rows, dims = ("x".join(map(str, sizes)) for sizes in (self.cores.rows, self.cores.dims))
        return f"cores of rows {rows}, columns {dims}, rank {self.cores.rank}"

    def initial_parameters(self) -> dict[str, torch.Tensor]:
        (n1, n2, n3), (d1, d2, d3), rank = self.cores.rows, self.cores.dims, self.cores.rank
        # The product of a row's cores is a sum of rank^2 terms of three numbers each.
        std = (self.row_std() / rank) ** (1 / 3)
        return {
            "first": away_from_zero(n1, d1, rank) * std,
            "second": away_from_zero(n2, rank, d2 * rank) * std,
            "third": away_from_zero(n3, rank, d3) * std,
        }

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:

        bags = features[self.feature(index, "cores")]
        return pool_rows(self.rows_of(parameters, bags.values()), bags)

    def rows_of(self, parameters: Mapping[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """Map [ids] to rows [ids, D]."""
        import torch

        first, second, third = (parameters[name] for name in ("first", "second", "third"))
        n1, n2, n3 = self.cores.rows
        pairs = (
            _products_of_all(first, second, ids // n3) if n1 * n2 <= MAX_PAIRS else _products(first, second, ids // n3)
        )
        rows = torch.bmm(pairs, third.index_select(0, ids % n3))
        return rows.reshape(-1, self.table.embedding_dim)


def _products(first: torch.Tensor, second: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Map pairs (i1, i2) [ids] to products [ids, d1 d2, r]."""
    import torch

    (n2, rank, columns), d1 = second.shape, first.shape[1]
    left, right = first.index_select(0, pairs // n2), second.index_select(0, pairs % n2)
    # All sizes are given, because torch cannot infer one for a batch without ids.
    return torch.bmm(left, right).reshape(left.shape[0], d1 * columns // rank, rank)


def _products_of_all(first: torch.Tensor, second: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    (n1, d1, rank), (n2, _, columns) = first.shape, second.shape
    # [n1 d1, r] times [r, n2 d2 r]
    products = first.reshape(n1 * d1, rank) @ second.transpose(0, 1).reshape(rank, -1)
    each = products.view(n1, d1, n2, -1).transpose(1, 2).reshape(n1 * n2, -1)
    return each.index_select(0, pairs).view(pairs.shape[0], d1 * columns // rank, rank)


def away_from_zero(*shape: int) -> torch.Tensor:
    """Sample a normal distribution without the numbers near 0, scaled to standard deviation 1
    (TT-Rec's sampled Gaussian, section 4.2).

    Sums of products of such numbers come closest to the uniform distribution that embedding tables
    are initialized with.
    """
    import torch

    with torch.device("cpu"):  # the remaining tensors may be on the meta device
        tail = 1 - torch.distributions.Normal(0.0, 1.0).cdf(torch.tensor(LEAST)).item()
    sampled = -torch.special.ndtri(torch.rand(shape, dtype=torch.float64).clamp(min=1e-12) * tail)
    signs = torch.randint(0, 2, shape) * 2 - 1
    density = math.exp(-(LEAST**2) / 2) / math.sqrt(2 * math.pi)
    return (sampled * signs / math.sqrt(1 + LEAST * density / tail)).float()


def _factors_above(num_ids: int) -> tuple[int, int, int]:
    """Return three similar factors whose product is num_ids or slightly more."""
    first = max(1, math.ceil(round(num_ids ** (1 / 3), 9)))
    second = max(1, math.ceil(round(math.sqrt(num_ids / first), 9)))
    return first, second, max(1, -(-num_ids // (first * second)))


def _factors_of(dim: int) -> tuple[int, int, int]:
    """Return three similar factors of `dim` in ascending order."""
    choices = [
        (a, b, dim // (a * b))
        for a in range(1, dim + 1)
        if dim % a == 0
        for b in range(a, dim // a + 1)
        if (dim // a) % b == 0 and b <= dim // (a * b)
    ]
    return min(choices, key=lambda factors: sum(factors))
