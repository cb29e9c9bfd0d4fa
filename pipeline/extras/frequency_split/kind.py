"""Store a table as a hot head and a cold tail. Model, checkpoint and export see one table (stdlib
only).

Ids are sorted by descending frequency, so a table's first rows get most of its lookups. They are
`<table>__hot`, which is replicated or in the fastest memory. The remaining rows are
`<table>__cold`, which is sharded, in slower memory, or compressed (arXiv 2201.10095, 2411.01611).
The rows are initialized and trained like those of the unsplit table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.config.registry import register
from pipeline.config.tables import AUTO, CompressionConfig, ConstraintConfig
from pipeline.embeddings.compression.kind import Bags, CompressionKind, Split, Whole, compressed, kind_of
from pipeline.embeddings.physical import leaves
from pipeline.embeddings.row_frequencies import frequencies_of_block, share_of_block
from pipeline.embeddings.table import Block, Table
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

HOT, COLD = "hot", "cold"
FASTEST_KERNELS = ["fused"]  # host memory on CPU, HBM on a GPU


@register("compression", "frequency_split")
class FrequencySplit(CompressionKind):
    """Look up the row of an id in the head or in the tail. A pooled bag is the sum of both."""

    settings = ("head_rows", "head_sharding_types", "tail", "skip_empty_bags")
    carries_weights = True

    @classmethod
    def check(cls, config: CompressionConfig) -> None:
        if config.head_rows != AUTO and not config.head_rows.isdecimal():
            raise ConfigError(f"compression.head_rows={config.head_rows} is neither {AUTO} nor a number of rows")
        if not config.head_sharding_types:
            raise ConfigError("compression.head_sharding_types is empty; remove it for [data_parallel]")
        if config.head_rows == AUTO and config.head_sharding_types != ["data_parallel"]:
            raise ConfigError(
                f"compression.head_rows={AUTO} compares the communication of a replicated head, but head_sharding_types="
                f"{config.head_sharding_types} is not [data_parallel]; give head_rows=<rows>"
            )
        if config.tail is not None and kind_of(config.tail) in (Whole, cls):
            raise ConfigError(
                f"compression.tail.kind={config.tail.kind}: without `tail` the tail is not compressed, and a split tail would be cold "
                "in both parts; leave tail out, or give it another kind"
            )

    @property
    def is_for_size(self) -> bool:
        return self.config.tail is not None

    @property
    def can_average(self) -> bool:
        return self.tail is None or self.tail.can_average

    @cached_property
    def head_rows(self) -> int:
        """Return the number of head rows. Raises ConfigError if it is not chosen yet."""
        if self.config.head_rows == AUTO:
            raise ConfigError(f"{self.key}.head_rows=auto has not been resolved for these ranks yet")
        return min(int(self.config.head_rows), self.table.num_embeddings)

    @cached_property
    def cold_part(self) -> Table | None:
        """Return the table of the cold rows, or None if all rows are hot."""
        table = self.table
        if self.head_rows >= table.num_embeddings:
            return None
        cold = replace(_block(table, COLD, self.head_rows, table.num_embeddings), compression=self.config.tail)
        return cold

    @cached_property
    def tail(self) -> CompressionKind | None:
        return None if self.cold_part is None else compressed(self.cold_part)

    def parts(self) -> list[Table]:
        """Return the hot part, then the cold part, without empty parts.

        The cold part may be compressed.

        Raises:
            ConfigError: ids are not sorted by frequency.
        """
        table, config = self.table, self.config
        if table.frequencies is not None and not table.frequencies.by_row:
            raise ConfigError(
                f"tables.{table.config_name}: kind=frequency_split uses the first rows as the "
                "hottest, but hashed ids have no order; prepare the data with "
                "ids.kind=vocabulary, or use kind=managed_collision"
            )
        cold = [] if self.cold_part is None else [self.cold_part]
        if not self.head_rows:
            return cold
        replicated = config.head_sharding_types == ["data_parallel"]
        hot = replace(
            _block(table, HOT, 0, self.head_rows),
            data_type="fp32" if replicated else table.data_type,
            sharding=ConstraintConfig(
                config.head_sharding_types, [] if replicated else FASTEST_KERNELS, table.sharding.min_partition
            ),
        )
        return [hot, *cold]

    def split(self, index: int) -> Split:
        from pipeline.embeddings.id_splitter import in_range

        hot, end, feature = self.head_rows, self.table.num_embeddings, self.feature(index, HOT)
        split_cold = None if self.tail is None else self.tail.split(index)

        def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
            if hot:
                yield feature, in_range(bags, 0, hot)
            if split_cold is not None:
                yield from split_cold(in_range(bags, hot, end))

        return split

    def id_features(self, index: int) -> list[str]:
        hot = [self.feature(index, HOT)] if self.head_rows else []
        return hot if self.tail is None else [*hot, *self.tail.id_features(index)]

    def often_empty_features(self) -> set[str]:
        """Return the features of the cold tail, in which many bags have no id."""
        if self.cold_part is None or not self.config.skip_empty_bags or not self.head_rows:
            return set()
        return {feature for part in leaves(self.cold_part) for feature in part.feature_names}

    def initial_parameters(self) -> dict[str, torch.Tensor]:
        tail = {} if self.tail is None else self.tail.initial_parameters()
        return {f"tail.{name}": value for name, value in tail.items()}

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:
        parts = [pooled[self.feature(index, HOT)]] if self.head_rows else []
        if self.tail is not None:
            own = {name.removeprefix("tail."): value for name, value in parameters.items()}
            parts.append(self.tail.compose(own, pooled, features, index))
        return sum(parts[1:], parts[0])

    def embed_files(self) -> tuple[CompressionConfig, Sequence[Sequence[int]]]:
        if self.config.tail is None or self.tail is None:
            return self.config, []
        tail, numbers = self.tail.embed_files()
        return replace(self.config, tail=tail), numbers

    @classmethod
    def restore_files(cls, config: CompressionConfig, numbers: list[list[int]]) -> CompressionConfig:
        assert config.tail is not None
        return replace(config, tail=kind_of(config.tail).restore_files(config.tail, numbers))


def has_auto_head(config: CompressionConfig | None) -> bool:
    """Return whether the number of head rows is not chosen yet."""
    return config is not None and kind_of(config) is FrequencySplit and config.head_rows == AUTO


def _block(table: Table, part: str, first: int, end: int) -> Table:
    share = share_of_block(table.frequencies, first, end, table.num_embeddings)
    return replace(
        table,
        name=f"{table.name}__{part}",
        num_embeddings=end - first,
        feature_names=[f"{feature}__{part}" for feature in table.feature_names],
        pooling="sum",  # the sums are divided by the length of the complete bag
        # by the rows of the complete table
        init=table.init.scaled(table.num_embeddings, table.embedding_dim),
        pooling_factors=[share * factor for factor in table.pooling_factors],
        frequencies=frequencies_of_block(table.frequencies, first, end),
        compression=None,
        part_of=table.whole_name,
        rows_of=Block(table.name, first, table.num_embeddings),
    )
