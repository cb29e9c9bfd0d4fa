"""Turn ids without bound into rows of a table that keeps the ones in use, as TorchRec's managed collision does (stdlib only).

An id is hashed to one of `buckets` and to a number within it, before it goes to the rank that holds the bucket's rows. There a
map gives it a row (training/managed_rows.py). A bucket's rows and its part of the map lie together, whatever the plan and the
number of ranks, so a checkpoint is resharded like any other.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.tables import ConstraintConfig
from pipeline.embeddings.table import ManagedRows, Table
from pipeline.runtime.errors import ConfigError

MANAGED = "managed"
IDS_A_BUCKET = 1 << 48  # hashes within a bucket: two of a billion ids fall on one with odds of 1 in 5,000 at 8 buckets
SHARDING_TYPES = ("row_wise", "table_wise")  # a rank has the whole of a row, and no other rank has it


def managed_rows(table: Table) -> ManagedRows:
    """Raises ConfigError where the settings do not make a table."""
    config, key = table.compression, f"tables.{table.name}.compression"
    assert config is not None and config.kind == "managed_collision"
    if config.num_rows is None:
        raise ConfigError(f"{key}: kind=managed_collision wants num_rows, of the ids that are to have one at a time")
    least = 2 * config.buckets  # the last row of a bucket is everybody's who has none
    if config.num_rows < least:
        raise ConfigError(
            f"{key}.num_rows={config.num_rows} in {config.buckets} buckets leaves less than 2 rows to one; use at least "
            f"{least}, or fewer buckets"
        )
    rows = -(-config.num_rows // config.buckets) * config.buckets
    return ManagedRows(f"{table.name}__{MANAGED}", rows, config.buckets, config.policy, config.eviction_interval)


def managed_part(table: Table) -> list[Table]:
    """The one part that has rows. Raises ConfigError as managed_rows, and for sharding types that cannot hold the map."""
    managed, asked = managed_rows(table), table.sharding.sharding_types
    kept = [kind for kind in asked or SHARDING_TYPES if kind in SHARDING_TYPES]
    if not kept:
        raise ConfigError(
            f"tables.{table.name}.sharding.sharding_types={asked}: a row of kind=managed_collision is given away by the one rank "
            f"that holds all of it; allow one of {', '.join(SHARDING_TYPES)}"
        )
    part = replace(
        table,
        name=managed.table,
        num_embeddings=managed.num_rows,
        feature_names=[f"{feature}__{MANAGED}" for feature in table.feature_names],
        pooling="sum",  # divided by the bag's length afterwards
        sharding=ConstraintConfig(kept, table.sharding.compute_kernels, table.sharding.min_partition),
        frequencies=None,
        compression=None,
        max_ids=[],
        part_of=table.config_name,
        rows_of=None,
        managed=managed,
    )
    return [part]
