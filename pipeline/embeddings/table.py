"""Say what an embedding table is, with nothing left open (stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.checks import check_above, check_at_least, check_choice
from pipeline.embeddings.compression import CompressionConfig
from pipeline.embeddings.row_frequencies import RowFrequencies

POOLINGS = ("sum", "mean")
DATA_TYPES = ("fp32", "fp16")
INITS = ("uniform", "normal", "zeros")
SHARDING_TYPES = (
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard",
)  # fmt: skip
COMPUTE_KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching", "key_value")


@dataclass
class InitConfig:
    """uniform: in [-scale, scale], scale None = 1/sqrt(num_embeddings); normal: std = scale, None = 1/sqrt(embedding_dim)."""

    kind: str = "uniform"
    scale: float | None = None

    def __post_init__(self) -> None:
        check_choice("init.kind", self.kind, INITS)
        if self.scale is not None:
            check_above("init.scale", self.scale, 0.0)


@dataclass
class ConstraintConfig:
    """What the planner may choose for a table; empty lists allow all that the backend can do."""

    sharding_types: list[str] = field(default_factory=list)
    compute_kernels: list[str] = field(default_factory=list)
    min_partition: int | None = None  # narrowest column shard

    def __post_init__(self) -> None:
        for value in self.sharding_types:
            check_choice("sharding.sharding_types", value, SHARDING_TYPES)
        for value in self.compute_kernels:
            check_choice("sharding.compute_kernels", value, COMPUTE_KERNELS)
        check_at_least("sharding.min_partition", self.min_partition, 1, allow_none=True)


@dataclass(frozen=True)
class Block:
    """Rows first_row, first_row + 1, ... of a table of `num_embeddings`."""

    table: str
    first_row: int
    num_embeddings: int


@dataclass(frozen=True)
class ManagedRows:
    """What the map of a table goes by. `table` is the part that holds the rows."""

    table: str
    num_rows: int
    num_buckets: int
    policy: str
    eviction_interval: int

    @property
    def rows_a_bucket(self) -> int:
        return self.num_rows // self.num_buckets


@dataclass(frozen=True)
class Table:
    """A table with nothing left open. `pooling_factors[i]` is the mean number of ids a sample of `feature_names[i]`.

    `frequencies` is None where no data say how lookups fall on rows. `max_ids[i]` is the most ids a sample has of
    `feature_names[i]`, None where its lists have any length; empty: nobody asked. `config_name` is the entry of
    `tables` that a part of a compressed table comes from. `rows_of`: whose rows this one's are, and are drawn as;
    `managed`: what gives ids its rows, where ids have no bound;
    `note`: what a plan is to say of it.
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

    @property
    def config_name(self) -> str:
        return self.part_of or self.name
