"""Store rare ids in rows of few columns, and widen them by a projection per block (stdlib only;
arXiv 1909.11810).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import CompressionConfig
from pipeline.embeddings.compression.kind import Bags, CompressionKind, Split
from pipeline.embeddings.row_frequencies import RowFrequencies, frequencies_of_block, share_of_block
from pipeline.embeddings.table import SHARD_WIDTH, Table
from pipeline.runtime.errors import ConfigError, check_at_least

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

BLOCK_GROWTH = 8  # a block of ids has this many times the rows of all hotter blocks
DEFAULT_BLOCKS = 4


@dataclass(frozen=True)
class Block:
    """Ids first .. end - 1, stored in a table of `dim` columns."""

    first: int
    end: int
    dim: int

    @property
    def num_rows(self) -> int:
        return self.end - self.first


@register("compression", "mixed_dimension")
class MixedDimension(CompressionKind):
    """Compute the row of an id from the row of its block. If the block is narrower than D, multiply
    the row by the block's projection [block's columns, D].
    """

    settings = ("ratio", "dims", "num_blocks", "temperature")
    carries_weights = True

    @classmethod
    def check(cls, config: CompressionConfig) -> None:
        check_at_least("compression.temperature", config.temperature, 0.0, allow_none=True)

    @cached_property
    def blocks(self) -> list[Block]:
        """Return blocks of ids by descending popularity. The first block is the most popular and
        has the most columns.

        Columns are proportional to popularity to the power of a temperature, as in arXiv
        1909.11810, algorithm 1: d = d0 (p / p0)^t, where p is the number of lookups of a block's
        average id; here for blocks within a table, in steps of 4.

        Raises:
            ConfigError: ids are not sorted by descending frequency, or sizes do not fit.
        """
        table, config = self.table, self.config
        if table.frequencies is not None and not table.frequencies.by_row:
            raise ConfigError(
                f"{self.key}: mixed_dimension uses popularity, but hashed ids have no order; "
                "prepare the feature with "
                "ids.kind=vocabulary, or use another kind"
            )
        bounds = _bounds(table.num_embeddings, len(config.dims) or config.num_blocks or DEFAULT_BLOCKS)
        if config.dims:
            return _given_blocks(table, config, bounds)
        if (config.temperature is None) == (config.ratio is None):
            raise ConfigError(f"{self.key}: mixed_dimension needs one of dims, temperature and ratio")
        popularity = [_popularity(table.frequencies, first, end, table.num_embeddings) for first, end in bounds]
        if config.temperature is not None:
            return _sized(table, bounds, popularity, config.temperature)
        limit, high = self.budget(), 16.0
        assert limit is not None
        if _numbers(least := _sized(table, bounds, popularity, high), table.embedding_dim) > limit:
            raise ConfigError(
                f"{self.key}.ratio={config.ratio:g} is more than blocks of at least {SHARD_WIDTH} columns can reach, which is "
                f"{table.num_embeddings * table.embedding_dim / _numbers(least, table.embedding_dim):.3g} at "
                f"embedding_dim={table.embedding_dim}; lower it, or use another kind"
            )
        low = 0.0
        for _ in range(40):
            middle = (low + high) / 2
            fits = _numbers(_sized(table, bounds, popularity, middle), table.embedding_dim) <= limit
            low, high = (low, middle) if fits else (middle, high)
        return _sized(table, bounds, popularity, high)

    def parts(self) -> list[Table]:
        curve, num_ids = self.table.frequencies, self.table.num_embeddings
        return [
            self.part(
                f"block_{number}",
                block.num_rows,
                dim=block.dim,
                frequencies=frequencies_of_block(curve, block.first, block.end),
                share=share_of_block(curve, block.first, block.end, num_ids),
            )
            for number, block in enumerate(self.blocks)
        ]

    def split(self, index: int) -> Split:
        from pipeline.embeddings.id_splitter import in_range

        def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
            for feature, block in zip(self.id_features(index), self.blocks, strict=True):
                yield feature, in_range(bags, block.first, block.end)

        return split

    def id_features(self, index: int) -> list[str]:
        return [self.feature(index, f"block_{number}") for number in range(len(self.blocks))]

    def num_dense_numbers(self) -> int:
        return sum(projection_numbers(block, self.table.embedding_dim) for block in self.blocks)

    def initial_parameters(self) -> dict[str, torch.Tensor]:
        import torch

        dim = self.table.embedding_dim
        projections = {
            f"projections.block_{number}": torch.randn(block.dim, dim) / math.sqrt(block.dim)
            for number, block in enumerate(self.blocks)
            if block.dim < dim
        }
        # block_10 before block_2, as in existing artifacts
        return dict(sorted(projections.items()))

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:
        """Pool a bag's rows before projecting them, because the projection is linear."""
        columns = []
        for number, feature in enumerate(self.id_features(index)):
            projection = parameters.get(f"projections.block_{number}")
            columns.append(pooled[feature] if projection is None else pooled[feature] @ projection)
        return sum(columns[1:], columns[0])


def _bounds(num_ids: int, num_blocks: int) -> list[tuple[int, int]]:
    """Return (first, end) of the blocks, which grow by BLOCK_GROWTH. There are fewer blocks if there are few ids."""
    ends = sorted({max(1, num_ids // BLOCK_GROWTH ** (num_blocks - 1 - index)) for index in range(num_blocks)})
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _given_blocks(table: Table, config: CompressionConfig, bounds: list[tuple[int, int]]) -> list[Block]:
    key = f"tables.{table.config_name}.compression"
    if config.temperature is not None or config.ratio is not None or config.num_blocks is not None:
        raise ConfigError(f"{key}: dims set all sizes; remove temperature, ratio and num_blocks")
    if any(later > former for former, later in zip(config.dims, config.dims[1:], strict=False)):
        raise ConfigError(f"{key}.dims={config.dims} must not grow: the hottest ids come first")
    if config.dims[0] > table.embedding_dim:
        raise ConfigError(
            f"{key}.dims={config.dims}: no block is wider than the table's embedding_dim={table.embedding_dim}"
        )
    if len(bounds) < len(config.dims):
        raise ConfigError(f"{key}.dims={config.dims}: {table.num_embeddings} ids make only {len(bounds)} blocks")
    return [Block(first, end, dim) for (first, end), dim in zip(bounds, config.dims, strict=True)]


def _popularity(frequencies: RowFrequencies | None, first: int, end: int, num_ids: int) -> float:
    """Return the lookups of the average id of a block. Without frequencies they follow Zipf's law."""
    if frequencies is None:
        return math.log((end + 1) / (first + 1)) / math.log(num_ids + 1) / (end - first)
    return max(share_of_block(frequencies, first, end, num_ids), 1e-12) / (end - first)


def _sized(table: Table, bounds: list[tuple[int, int]], popularity: list[float], temperature: float) -> list[Block]:
    dim, blocks = table.embedding_dim, []
    widest = dim
    for (first, end), each in zip(bounds, popularity, strict=True):
        wanted = dim * (each / popularity[0]) ** temperature
        widest = min(widest, max(SHARD_WIDTH, SHARD_WIDTH * round(wanted / SHARD_WIDTH)))
        blocks.append(Block(first, end, widest))
    return blocks


def _numbers(blocks: list[Block], dim: int) -> int:
    return sum(block.num_rows * block.dim + projection_numbers(block, dim) for block in blocks)


def projection_numbers(block: Block, dim: int) -> int:
    """Return how many numbers a block's projection has. A block as wide as the table has none."""
    return block.dim * dim if block.dim < dim else 0
