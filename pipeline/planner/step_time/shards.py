"""List what each rank's kernels and collectives have to do for the tables, by where their shards lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan

from pipeline.embeddings.table import Table
from pipeline.planner.cost_model import ID_BYTES, LENGTH_BYTES
from pipeline.planner.step_time.frequency import bands_of, block_of
from pipeline.planner.step_time.table_work import TableShape

BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")


@dataclass
class RankTables:
    """whole: shards that see all ids of their rows' batch, of all ranks; rows: shards of rows; replicated: whole tables on
    every rank. The widths are columns that a sample's rows have."""

    whole: list[TableShape] = field(default_factory=list)
    rows: list[TableShape] = field(default_factory=list)
    replicated: list[TableShape] = field(default_factory=list)
    whole_width: int = 0
    rows_width: int = 0
    replicated_bytes: float = 0.0

    @property
    def shapes(self) -> list[TableShape]:
        return [*self.whole, *self.rows, *self.replicated]


@dataclass(frozen=True)
class Placement:
    """A table's sharding type, and of each of its shards (rank, first row, rows, columns)."""

    table: str
    kind: str
    shards: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class PlannedTables:
    """`ids_bytes`: ids and lengths of a rank's own samples, once for each rank that needs them, of tables that lie whole;
    `row_ids_bytes` of those that are sharded by rows."""

    ranks: list[RankTables]
    ids_bytes: float
    row_ids_bytes: float


def placements_of(plan: ShardingPlan) -> list[Placement]:
    found = []
    for module in plan.plan.values():
        for name, sharding in module.items():
            assert isinstance(sharding, ParameterSharding)
            found.append(Placement(name, sharding.sharding_type, _shards(sharding)))
    return found


def planned_tables(
    placements: Iterable[Placement], tables: Sequence[Table], batch_size: int, world_size: int
) -> PlannedTables:
    by_name = {table.name: table for table in tables}
    ranks = [RankTables() for _ in range(world_size)]
    ids_bytes = row_ids_bytes = 0.0
    for placed in placements:
        table = by_name[placed.table]
        own_ids = batch_size * (sum(table.pooling_factors) * ID_BYTES + len(table.feature_names) * LENGTH_BYTES)
        if placed.kind == "data_parallel":
            _replicate(ranks, table, batch_size)
        elif placed.kind in BY_ROWS:
            row_ids_bytes += own_ids
            _spread(ranks, table, placed, batch_size * world_size)
        else:
            ids_bytes += own_ids * len(placed.shards)
            _put_whole(ranks, table, placed, batch_size * world_size)
    return PlannedTables(ranks, ids_bytes, row_ids_bytes)


def _shape(table: Table, dim: int, samples: float, ids_share: float = 1.0) -> tuple[float, int, float]:
    features = len(table.feature_names)
    return sum(table.pooling_factors) / features * ids_share, features, samples


def _replicate(ranks: list[RankTables], table: Table, samples: int) -> None:
    pooling, features, count = _shape(table, table.embedding_dim, samples)
    bands = bands_of(table.frequencies, table.num_embeddings)
    for rank in ranks:
        rank.replicated.append(TableShape(bands, table.embedding_dim, pooling, count, features))
        rank.replicated_bytes += 4.0 * table.num_embeddings * table.embedding_dim


def _shards(sharding: ParameterSharding) -> tuple[tuple[int, int, int, int], ...]:
    if sharding.sharding_type == "data_parallel":
        return ()
    spec = sharding.sharding_spec
    assert isinstance(spec, EnumerableShardingSpec)
    return tuple(
        (shard.placement.rank(), shard.shard_offsets[0], shard.shard_sizes[0], shard.shard_sizes[1])  # type: ignore[union-attr]
        for shard in spec.shards
    )


def _put_whole(ranks: list[RankTables], table: Table, placed: Placement, samples: int) -> None:
    bands = bands_of(table.frequencies, table.num_embeddings)
    for rank, _, _, columns in placed.shards:
        pooling, features, count = _shape(table, columns, samples)
        ranks[rank].whole.append(TableShape(bands, columns, pooling, count, features))
        ranks[rank].whole_width += columns * features


def _spread(ranks: list[RankTables], table: Table, placed: Placement, samples: int) -> None:
    bands = bands_of(table.frequencies, table.num_embeddings)
    by_row = table.frequencies is not None and table.frequencies.by_row
    for rank, first, rows, columns in placed.shards:
        own, share = block_of(bands, first, rows, by_row)
        pooling, features, count = _shape(table, columns, samples, share)
        ranks[rank].rows.append(TableShape(own, columns, pooling, count, features))
        ranks[rank].rows_width += columns * features
