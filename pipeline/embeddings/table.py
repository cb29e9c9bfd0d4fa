"""Define a resolved embedding table (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.config.compression import CompressionConfig
from pipeline.config.tables import ConstraintConfig, InitConfig, TiersConfig, entry_name
from pipeline.embeddings.row_frequencies import RowFrequencies

SHARD_WIDTH = 4  # what the columns of a table and of each of its shards are a multiple of, for FBGEMM


@dataclass(frozen=True)
class Block:
    """Rows first_row, first_row + 1, ... of a table of `num_embeddings`."""

    table: str
    first_row: int
    num_embeddings: int


@dataclass(frozen=True)
class ManagedRows:
    """Settings of the map from hashed ids to rows. `table` is the part that holds the rows.

    admit_count, admit_probability: what an id without a row needs to be considered for one. max_idle_steps: after which an id
    that does not come loses its row; None: rows are taken from ids by others alone.
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
    """A sequence that a model reads position by position: its newest `num_positions` ids, and how many there are.

    search_in, search_for: of these, only positions where the sequence search_in has the id of the feature search_for.
    """

    feature: str
    num_positions: int
    search_in: str | None = None
    search_for: str | None = None


@dataclass(frozen=True)
class Table:
    """An embedding table with every value resolved. `pooling_factors[i]` is the mean number of ids a sample of `feature_names[i]`.

    `frequencies` is None where no data say how lookups fall on rows. `max_ids[i]` is the most ids a sample has of
    `feature_names[i]`, None where its lists have any length; empty: unknown. `part_of` is the name of the compressed table
    that a part belongs to. `rows_of`: the table that
    this part's rows belong to and are initialized as; `l2`: of touched rows, in their gradient; `managed`: what gives ids its rows, where ids have no bound; `note`: a
    sentence for the plan's report; `positions`: its sequences that are not pooled (embeddings.positions);
    `padding`: rows a sample of positions without an id, which are returned and sent as zeros; `is_weighted`: ids of some
    feature have weights; `tiers`: of a table whose rows lie on an SSD but for some.
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
    l2: float = 0.0
    positions: list[Positions] = field(default_factory=list)
    padding: float = 0.0
    is_weighted: bool = False
    tiers: TiersConfig | None = None

    @property
    def whole_name(self) -> str:
        """The name of the table that this is, or is a part of."""
        return self.part_of or self.name

    @property
    def config_name(self) -> str:
        """The entry of the job's `tables` that this comes from."""
        return entry_name(self.whole_name)
