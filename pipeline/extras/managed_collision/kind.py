"""Store any number of ids in a table that keeps only rows of ids in use, like TorchRec's managed
collision (stdlib only).

An id is hashed to one of `buckets` and to a number within it, before it is sent to the rank that
holds the bucket's rows. A map on this rank gives the id a row
(extras/managed_collision/managed_tables.py). A bucket's rows and its part of the map are on the
same rank under any plan, so a checkpoint is resharded like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from pipeline.config.registry import register
from pipeline.config.tables import CompressionConfig, ConstraintConfig
from pipeline.embeddings.compression.kind import Bags, CompressionKind, Split
from pipeline.embeddings.table import IDS_A_BUCKET, MANAGED, ManagedRows, Table
from pipeline.runtime.errors import ConfigError, check_at_least, check_choice, check_within

POLICIES = ("lfu", "lru", "distance_lfu")
# one rank holds complete rows, and no other rank has them
SHARDING_TYPES = ("row_wise", "table_wise")


@dataclass
class AdmissionOptions:
    """Define the compression.options of a managed table.

    admit_count: an id without a row must occur this often since the last eviction to be considered
    for a row. admit_probability: each step counts it with this probability, so an id gets a row
    after 1/p of its steps on average. max_idle_steps: an id that does not occur for this many steps
    loses its row at the next eviction; None: it never loses its row for this reason.
    """

    admit_count: int = 1
    admit_probability: float = 1.0
    max_idle_steps: int | None = None

    def __post_init__(self) -> None:
        check_at_least("compression.options.admit_count", self.admit_count, 1)
        check_within("compression.options.admit_probability", self.admit_probability, 0.0, 1.0)
        check_at_least("compression.options.max_idle_steps", self.max_idle_steps, 1, allow_none=True)


@register("compression", "managed_collision")
class ManagedCollision(CompressionKind):
    """The map of a bucket gives each id a row, until the map evicts the id."""

    settings = ("num_rows", "seed", "policy", "eviction_interval", "buckets")
    Options = AdmissionOptions
    id_part = MANAGED
    carries_weights = True
    can_average = False  # rows belong to the ids that each host has seen

    @classmethod
    def check(cls, config: CompressionConfig) -> None:
        check_choice("compression.policy", config.policy, POLICIES)
        check_at_least("compression.eviction_interval", config.eviction_interval, 1)
        check_at_least("compression.buckets", config.buckets, 1)

    @cached_property
    def rows(self) -> ManagedRows:
        """Return the settings of the map. Raises ConfigError if the settings are not valid."""
        config = self.config
        if config.num_rows is None:
            raise ConfigError(
                f"{self.key}: kind=managed_collision needs num_rows, the number of ids that have a row at a time"
            )
        fewest = 2 * config.buckets  # ids without a row share the last row of their bucket
        if config.num_rows < fewest:
            raise ConfigError(
                f"{self.key}.num_rows={config.num_rows} in {config.buckets} buckets leaves less than 2 rows to a bucket; use at least "
                f"{fewest}, or fewer buckets"
            )
        rows = -(-config.num_rows // config.buckets) * config.buckets
        options = config.read_options(AdmissionOptions)
        return ManagedRows(
            f"{self.table.name}__{MANAGED}", rows, config.buckets, config.policy, config.eviction_interval,
            options.admit_count, options.admit_probability, options.max_idle_steps,
        )  # fmt: skip

    def parts(self) -> list[Table]:
        """Return the single part with rows.

        Raises ConfigError if settings or sharding types do not support the map.
        """
        table, asked = self.table, self.table.sharding.sharding_types
        kept = [name for name in asked or SHARDING_TYPES if name in SHARDING_TYPES]
        if not kept:
            raise ConfigError(
                f"tables.{table.config_name}.sharding.sharding_types={asked}: a row of kind=managed_collision is assigned by the "
                f"rank that holds the complete row; allow one of {', '.join(SHARDING_TYPES)}"
            )
        part = replace(
            table,
            name=self.rows.table,
            num_embeddings=self.rows.num_rows,
            feature_names=[f"{feature}__{MANAGED}" for feature in table.feature_names],
            pooling="sum",  # divided by the bag's length afterwards
            sharding=ConstraintConfig(kept, table.sharding.compute_kernels, table.sharding.min_partition),
            frequencies=None,
            compression=None,
            max_ids=[],
            part_of=table.whole_name,
            rows_of=None,
            managed=self.rows,
        )
        return [part]

    def split(self, index: int) -> Split:
        """Return ids bucket * IDS_A_BUCKET + a seeded 48-bit hash within the bucket."""
        import numpy as np

        from pipeline.data.read.streams import mix

        feature = self.feature(index, MANAGED)
        buckets, ids_a_bucket = np.uint64(self.rows.num_buckets), np.uint64(IDS_A_BUCKET)
        key = mix(np.array([self.config.seed], np.uint64))

        def split(bags: Bags) -> Iterator[tuple[str, Bags]]:
            words = mix(bags.ids.view(np.uint64) ^ key)
            bucket = (words >> np.uint64(32)) * buckets >> np.uint64(32)
            # Mix again; otherwise the bits that chose the bucket would be equal for all its ids.
            within = mix(words) & (ids_a_bucket - np.uint64(1))
            yield feature, bags._replace(ids=(bucket * ids_a_bucket + within).view(np.int64))

        return split
