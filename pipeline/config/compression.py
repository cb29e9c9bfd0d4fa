"""Say how a table is made smaller: `tables.<name>.compression`, one kind with its settings (stdlib only).

docs/embeddings.md says which kind when.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice

SCHEMES = ("naive", "quotient_remainder", "generalised", "chinese_remainder", "given")
OPERATIONS = ("add", "multiply", "concatenate")
AUTO = "auto"
POLICIES = ("lfu", "lru", "distance_lfu")
ANY_KIND = {"kind", "min_rows"}
OWN_FIELDS: dict[str, set[str]] = {
    "none": set(),
    "hash": {"ratio", "num_rows", "seed"},
    "quotient_remainder": {
        "ratio", "scheme", "bases", "num_partitions", "operation", "dims", "assignments", "assignments_file", "max_ids_per_bag",
    },
    "path_based": {"ratio", "num_rows", "hidden_size", "max_ids_per_bag"},
    "mixed_dimension": {"ratio", "dims", "num_blocks", "temperature"},
    "tensor_train": {"ratio", "rank", "row_factors", "dim_factors"},
    "frequency_split": {"head_rows", "head_sharding_types", "tail", "skip_empty_bags"},
    "managed_collision": {"num_rows", "seed", "policy", "eviction_interval", "buckets"},
}  # fmt: skip


@dataclass
class CompressionConfig:
    """How a table's rows are told by fewer numbers. Of the settings below a kind takes those that are its own.

    kind none: not at all, whatever tables.default says. Tables of fewer rows than `min_rows` stay as they are.
    ratio: how many times smaller than the full table; None where other settings say the sizes.
    """

    kind: str = "none"
    min_rows: int = 0
    ratio: float | None = None
    num_rows: int | None = None  # of the hashed table, or of path_based's base table
    seed: int = 0  # of the hash
    # quotient_remainder (arXiv 1909.02107). `bases`: how many classes each partition of the ids has.
    scheme: str = "quotient_remainder"
    num_partitions: int | None = None  # None: as many as there are bases, or 2
    bases: list[int] = field(default_factory=list)
    operation: str = "add"
    dims: list[int] = field(
        default_factory=list
    )  # of each part, or block of mixed_dimension; empty: by the other settings
    assignments: list[list[int]] = field(default_factory=list)  # scheme given: [partition][id] -> class
    assignments_file: str | None = None  # the same as a .npy file of integers
    max_ids_per_bag: int | None = None  # of lists whose ids are composed one by one; a longer one stops the run
    hidden_size: int = 16  # path_based: of the small network of each bucket
    # mixed_dimension (arXiv 1909.11810): columns go with popularity ** temperature
    num_blocks: int | None = None
    temperature: float | None = None
    # tensor_train (arXiv 2101.11714): three cores
    rank: int | None = None
    row_factors: list[int] = field(default_factory=list)
    dim_factors: list[int] = field(default_factory=list)
    # frequency_split (arXiv 2201.10095, 2411.01611). `head_rows`: a number, or `auto` for the fewest bytes on the wire.
    head_rows: str = AUTO
    head_sharding_types: list[str] = field(default_factory=lambda: ["data_parallel"])
    tail: CompressionConfig | None = None  # None: whole, by the table's own `sharding`
    skip_empty_bags: bool = True  # bags without a cold id send nothing
    # managed_collision: TorchRec's MCH. Every so many steps each bucket decides which ids have rows of their own.
    policy: str = "lfu"
    eviction_interval: int = 100
    buckets: int = 8  # a multiple of the number of ranks, now and later

    def __post_init__(self) -> None:
        check_choice("compression.kind", self.kind, OWN_FIELDS)
        check_choice("compression.scheme", self.scheme, SCHEMES)
        check_choice("compression.operation", self.operation, OPERATIONS)
        check_at_least("compression.min_rows", self.min_rows, 0)
        check_at_least("compression.seed", self.seed, 0)
        if self.ratio is not None:
            check_above("compression.ratio", self.ratio, 1.0)
        for name in ("num_rows", "max_ids_per_bag", "hidden_size", "num_blocks", "rank"):
            check_at_least(f"compression.{name}", getattr(self, name), 1, allow_none=True)
        check_at_least("compression.num_partitions", self.num_partitions, 2, allow_none=True)
        check_at_least("compression.temperature", self.temperature, 0.0, allow_none=True)
        for name in ("bases", "dims", "row_factors", "dim_factors"):
            for value in getattr(self, name):
                check_at_least(f"each of compression.{name}", value, 1)
        check_choice("compression.policy", self.policy, POLICIES)
        check_at_least("compression.eviction_interval", self.eviction_interval, 1)
        check_at_least("compression.buckets", self.buckets, 1)
        self._check_split()
        self._refuse_settings_of_other_kinds()

    def _check_split(self) -> None:
        self.head_rows = str(self.head_rows)
        if self.head_rows != AUTO and not self.head_rows.isdecimal():
            raise ConfigError(f"compression.head_rows={self.head_rows} is neither {AUTO} nor a number of rows")
        if not self.head_sharding_types:
            raise ConfigError("compression.head_sharding_types is empty; leave it out for [data_parallel]")
        if self.head_rows == AUTO and self.head_sharding_types != ["data_parallel"]:
            raise ConfigError(
                f"compression.head_rows={AUTO} weighs what a replicated head sends, and head_sharding_types="
                f"{self.head_sharding_types} is not [data_parallel]; give head_rows=<rows>"
            )
        if self.tail is not None and self.tail.kind in ("none", "frequency_split"):
            raise ConfigError(
                f"compression.tail.kind={self.tail.kind}: the tail is whole without `tail`, and a split tail would be cold "
                "in both parts; leave tail out, or give it another kind"
            )

    def _refuse_settings_of_other_kinds(self) -> None:
        fresh = {
            one.name: one.default_factory() if callable(one.default_factory) else one.default for one in fields(self)
        }
        for name, value in vars(self).items():
            if name in ANY_KIND | OWN_FIELDS[self.kind] or value == fresh[name]:
                continue
            owners = [kind for kind, own in OWN_FIELDS.items() if name in own]
            raise ConfigError(
                f"compression.{name}={value} is a setting of {', '.join(owners)}, but compression.kind={self.kind}; "
                f"leave it out, or set kind={owners[0]}"
            )
