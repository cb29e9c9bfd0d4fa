"""Define an embedding table whose settings are all resolved (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeline.config.tables import CompressionConfig, ConstraintConfig, InitConfig, TiersConfig, entry_name
from pipeline.embeddings.row_frequencies import RowFrequencies

SHARD_WIDTH = 4  # FBGEMM needs columns of a table, and of each shard, to be a multiple of this
# Managed collision: the part with the rows, and the maps' name in the keys of a checkpoint.
MANAGED, MANAGED_STATE = "managed", "managed_rows"
# hashes within a bucket: two of a billion ids collide with probability 1 / 5,000 at 8 buckets
IDS_A_BUCKET = 1 << 48


@dataclass(frozen=True)
class Block:
    """Rows first_row, first_row + 1, ... of a table with `num_embeddings` rows."""

    table: str
    first_row: int
    num_embeddings: int


@dataclass(frozen=True)
class ManagedRows:
    """Hold the settings of the map from hashed ids to rows. `table`: the part that holds the rows.

    admit_count, admit_probability: conditions for an id to get a row. max_idle_steps: an id that
    does not occur for this many steps loses its row; None: it loses the row only to other ids.
    """

    table: str
    num_rows: int
    num_buckets: int
    policy: str
    eviction_interval: int
    admit_count: int = 1
    admit_probability: float = 1.0
    max_idle_steps: int | None = None

    @property
    def rows_a_bucket(self) -> int:
        return self.num_rows // self.num_buckets


@dataclass(frozen=True)
class Positions:
    """A sequence that is read by position: its newest `num_positions` ids, and how many there are.

    search_in, search_for: read only positions where the sequence search_in has the id of the
    feature search_for.
    """

    feature: str
    num_positions: int
    search_in: str | None = None
    search_for: str | None = None


@dataclass(frozen=True)
class RowUpdates:
    """How the rows of one table are updated, where this differs from optimizer.sparse.

    l2: added to the gradient of touched rows, times the row. weight_decay: None means the
    optimizer's. lr_factor: multiplies the learning rate. warmup_steps: steps of a linear rise of
    the rate from the start of the run. frozen: rows never change, and have no optimizer state.
    """

    l2: float = 0.0
    weight_decay: float | None = None
    lr_factor: float = 1.0
    warmup_steps: int = 0
    frozen: bool = False

    @property
    def group(self) -> str:
        """Return a name for tables that one lookup may update together; "" for usual tables."""
        own = (self.weight_decay, self.lr_factor, self.warmup_steps, self.frozen)
        return "" if own == (None, 1.0, 0, False) else "frozen" if self.frozen else str(own)

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate of update `step`, counted from 0."""
        return 0.0 if self.frozen else self.lr_factor * min(1.0, (step + 1) / max(1, self.warmup_steps))


@dataclass(frozen=True)
class Table:
    """An embedding table with every value resolved.

    pooling_factors[i]: mean number of ids per sample of feature_names[i].
    frequencies: how lookups are distributed over rows; None without data.
    max_ids[i]: maximum number of ids per sample of feature_names[i]; None for lists of any length; []: unknown.
    part_of: name of the compressed table that this part belongs to.
    rows_of: the table whose rows this part holds and is initialized as.
    managed: the map that assigns rows to ids of any number.
    note: a sentence for the plan's report.
    updates: what differs from optimizer.sparse.
    positions: the table's sequences that are not pooled (position_features).
    padding: rows per sample of positions without an id, which are returned and sent as zeros.
    is_weighted: ids of some feature have weights.
    tiers: set if most rows are on an SSD.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str]
    pooling: str
    data_type: str
    init: InitConfig
    sharding: ConstraintConfig
    pooling_factors: list[float]
    frequencies: RowFrequencies | None = None
    compression: CompressionConfig | None = None
    max_ids: list[int | None] = field(default_factory=list)
    part_of: str | None = None
    rows_of: Block | None = None
    managed: ManagedRows | None = None
    note: str = ""
    updates: RowUpdates = RowUpdates()
    positions: list[Positions] = field(default_factory=list)
    padding: float = 0.0
    is_weighted: bool = False
    tiers: TiersConfig | None = None

    @property
    def whole_name(self) -> str:
        """Return the name of this table, or the name of the table that it is a part of."""
        return self.part_of or self.name

    @property
    def config_name(self) -> str:
        """Return the name of the entry in the job's `tables` that defines this table."""
        return entry_name(self.whole_name)


# The number of ids is stored as count // 128 and count % 128: bf16 represents both, but not 257.
COUNT_COLUMNS, COUNT_UNIT = 2, 128


def position_features(positions: Positions) -> list[str]:
    """Return the features that a table looks up instead of the sequence, one per position, oldest position first."""
    return [f"{positions.feature}__{number}" for number in range(positions.num_positions)]


def by_position(table: Table) -> Table:
    """Return the table with one feature for each position of its sequences."""
    if not table.positions:
        return table
    read = {positions.feature: positions for positions in table.positions}
    names: list[str] = []
    factors: list[float] = []
    max_ids: list[int | None] = []
    padding = 0.0
    limits = table.max_ids or [1] * len(table.feature_names)
    for feature, factor, limit in zip(table.feature_names, table.pooling_factors, limits, strict=True):
        if feature not in read:
            names, factors, max_ids = [*names, feature], [*factors, factor], [*max_ids, limit]
            continue
        count = read[feature].num_positions
        names += position_features(read[feature])
        factors += [min(1.0, factor / count)] * count
        max_ids += [1] * count
        padding += max(0.0, count - factor)
    return replace(table, feature_names=names, pooling_factors=factors, max_ids=max_ids, positions=[], padding=padding)


def width_of(table: Table, feature: str) -> int:
    """Return how many columns a feature has in a model. A sequence has its rows and the number of ids."""
    for positions in table.positions:
        if positions.feature == feature:
            return positions.num_positions * table.embedding_dim + COUNT_COLUMNS
    return table.embedding_dim
