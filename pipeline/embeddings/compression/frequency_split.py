"""Turn a table into a hot head and a cold tail, one table to model, checkpoint and export (stdlib only).

Ids come by descending frequency, so a table's first rows take most of its lookups. As `<table>__hot` they are replicated,
or in the fastest memory; the others, `<table>__cold`, are sharded, in slower memory, or compressed themselves (arXiv
2201.10095, 2411.01611). The rows are those of the table before it was split: they are drawn alike, and train alike.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pipeline.config.compression import AUTO
from pipeline.config.tables import ConstraintConfig, InitConfig
from pipeline.embeddings.compression.part_frequencies import frequencies_of_block, share_of_block
from pipeline.embeddings.table import Block, Table
from pipeline.runtime.errors import ConfigError

HOT, COLD = "hot", "cold"
FASTEST_KERNELS = ["fused"]  # host memory on cpu, HBM on a GPU
UNEVEN = ("table_wise", "row_wise", "column_wise", "table_column_wise", "data_parallel")


def head_rows(table: Table) -> int:
    """Of a frequency_split table. Raises ConfigError where they are still to be chosen."""
    config = table.compression
    assert config is not None and config.kind == "frequency_split"
    if config.head_rows == AUTO:
        raise ConfigError(f"tables.{table.name}.compression.head_rows=auto has not been settled for these ranks yet")
    return min(int(config.head_rows), table.num_embeddings)


def hot_and_cold(table: Table) -> list[Table]:
    """The parts that have rows, the hot one first; the cold one may be compressed.

    Raises:
        ConfigError: ids that are not in the order of their frequency.
    """
    config, hot = table.compression, head_rows(table)
    assert config is not None
    if table.frequencies is not None and not table.frequencies.by_row:
        raise ConfigError(
            f"tables.{table.name}: kind=frequency_split takes the first rows for the hottest, and hashed ids are in no order; "
            "prepare the data with ids.kind=vocabulary, or use kind=managed_collision"
        )
    parts = []
    if hot:
        replicated = config.head_sharding_types == ["data_parallel"]
        parts.append(
            replace(
                _block(table, HOT, 0, hot),
                data_type="fp32" if replicated else table.data_type,
                sharding=ConstraintConfig(
                    config.head_sharding_types, [] if replicated else FASTEST_KERNELS, table.sharding.min_partition
                ),
            )
        )
    if hot < table.num_embeddings:
        cold = replace(_block(table, COLD, hot, table.num_embeddings), compression=config.tail)
        if config.skip_empty_bags and hot:
            cold = replace(cold, sharding=_without_even_batches(table))
        parts.append(cold)
    return parts


def cold_part(table: Table) -> Table | None:
    """None where the head is all there is."""
    part = hot_and_cold(table)[-1]
    return part if part.name.endswith(f"__{COLD}") else None


def _without_even_batches(table: Table) -> ConstraintConfig:
    """Sharding types whose collectives take fewer bags than there are samples."""
    asked = table.sharding.sharding_types
    if not asked:
        return table.sharding  # the planner tries none of the others beside them, but for several hosts
    kept = [kind for kind in asked if kind in UNEVEN]
    if not kept:
        raise ConfigError(
            f"tables.{table.name}.sharding.sharding_types={asked}: their collectives want as many bags of every feature, but "
            f"kind=frequency_split leaves out bags without cold ids; allow one of {', '.join(UNEVEN)}, or set "
            f"tables.{table.name}.compression.skip_empty_bags=false"
        )
    return replace(table.sharding, sharding_types=kept)


def _block(table: Table, part: str, first: int, end: int) -> Table:
    share = share_of_block(table.frequencies, first, end, table.num_embeddings)
    return replace(
        table,
        name=f"{table.name}__{part}",
        num_embeddings=end - first,
        feature_names=[f"{feature}__{part}" for feature in table.feature_names],
        pooling="sum",  # the two sums are divided by the whole bag's length
        init=_scaled_as(table),
        pooling_factors=[share * factor for factor in table.pooling_factors],
        frequencies=frequencies_of_block(table.frequencies, first, end),
        compression=None,
        part_of=table.config_name,
        rows_of=Block(table.name, first, table.num_embeddings),
    )


def _scaled_as(table: Table) -> InitConfig:
    """The scale of a draw goes by the number of the whole table's rows."""
    if table.init.kind != "uniform" or table.init.scale is not None:
        return table.init
    return InitConfig("uniform", 1 / math.sqrt(table.num_embeddings))
