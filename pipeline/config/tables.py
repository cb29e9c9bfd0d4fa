"""Define embedding tables: `tables.<name>` of a job (stdlib only).

The entry `default` supplies unset values of all tables. An entry such as `cat_*` supplies them for
tables whose names fit, and has priority over `default`. A table without feature_names embeds the
feature with the table's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase

from pipeline.config.compression import CompressionConfig
from pipeline.config.module_names import TAKEN
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within, did_you_mean

POOLINGS = ("sum", "mean")
DATA_TYPES = ("fp32", "fp16")
INITS = ("auto", "uniform", "normal", "xavier_uniform", "xavier_normal", "zeros")
SHARDING_TYPES = (
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard",
)  # fmt: skip
COMPUTE_KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching")
# TorchRec has this name, but FBGEMM has no kernel: https://github.com/pytorch/FBGEMM/issues/5666
NOT_IN_FBGEMM = "key_value"


@dataclass
class InitConfig:
    """uniform: in [-scale, scale], scale None = 1/sqrt(num_embeddings). normal: std = scale, None =
    1/sqrt(embedding_dim).

    xavier_uniform and xavier_normal: scale (None = 1) times the values for a layer of
    num_embeddings inputs and embedding_dim outputs (Glorot and Bengio, AISTATS 2010). The size is
    that the complete table has, not its shards. auto: as the model's config says
    (ModelConfig.table_init), with `scale` if it is set; without a model uniform.
    """

    kind: str = "auto"
    scale: float | None = None

    def __post_init__(self) -> None:
        check_choice("init.kind", self.kind, INITS)
        if self.scale is not None:
            check_above("init.scale", self.scale, 0.0)

    def scaled(self, num_embeddings: int, embedding_dim: int) -> InitConfig:
        """Return zeros unchanged, or uniform or normal with the scale for a table of that size."""
        if self.kind == "zeros":
            return self
        if self.kind in ("uniform", "auto"):
            return InitConfig("uniform", self.scale or 1 / math.sqrt(num_embeddings))
        if self.kind == "normal":
            return InitConfig("normal", self.scale or 1 / math.sqrt(embedding_dim))
        std = (self.scale or 1.0) * math.sqrt(2 / (num_embeddings + embedding_dim))
        return InitConfig("normal", std) if self.kind == "xavier_normal" else InitConfig("uniform", math.sqrt(3) * std)


@dataclass
class ConstraintConfig:
    """Choices of the planner for a table.

    Empty lists allow everything that the backend supports.
    """

    sharding_types: list[str] = field(default_factory=list)
    compute_kernels: list[str] = field(default_factory=list)
    min_partition: int | None = None  # width of the narrowest column shard

    def __post_init__(self) -> None:
        for value in self.sharding_types:
            check_choice("sharding.sharding_types", value, SHARDING_TYPES)
        if NOT_IN_FBGEMM in self.compute_kernels:
            raise ConfigError(
                f"sharding.compute_kernels={self.compute_kernels}: open-source FBGEMM has no {NOT_IN_FBGEMM} kernel "
                "(github.com/pytorch/FBGEMM/issues/5666). On CPU set tables.<name>.tiers, which keeps rows on an SSD; on GPUs use "
                "fused_uvm_caching, which keeps a table in host memory and its hot rows on the GPU, or give it a compression"
            )
        for value in self.compute_kernels:
            check_choice("sharding.compute_kernels", value, COMPUTE_KERNELS)
        check_at_least("sharding.min_partition", self.min_partition, 1, allow_none=True)


@dataclass
class TiersConfig:
    """Keep some of a table's rows in memory, and all trained rows on a local SSD
    (sharding.tier_folder).

    slots: below 1 it is the share of rows in memory, above 1 their number; 1 keeps all rows in
    memory. Tables with fewer than min_rows rows stay in memory completely. head: the share of a
    shard's slots reserved for its first rows. None: half if the data's ids are sorted by descending
    frequency, otherwise 0.
    """

    slots: float = 1.0
    min_rows: int = 100_000
    head: float | None = None

    def __post_init__(self) -> None:
        check_above("tiers.slots", self.slots, 0.0)
        check_at_least("tiers.min_rows", self.min_rows, 1)
        if self.head is not None:
            check_within("tiers.head", self.head, 0.0, 0.95)


def num_slots(slots: float, shard_rows: int, table_rows: int) -> int:
    """Return the number of slots of a shard: its part of the table's slots (TiersConfig.slots), at
    least 1."""
    share = slots if slots <= 1 else slots / table_rows
    return min(shard_rows, max(1, math.ceil(share * shard_rows - 1e-9)))


def head_rows(head: float, slots: int) -> int:
    """Return the number of rows of a shard with reserved slots (TiersConfig.head).

    At least two slots stay for other rows.
    """
    return max(0, min(int(head * slots), slots - 2))


DEFAULT = "default"
_ESCAPE = re.compile("%(25|2E)")


@dataclass
class TableConfig:
    """One table.

    None means the value of `tables.default`; for num_embeddings it means the data set's
    cardinality.
    """

    num_embeddings: int | None = None
    embedding_dim: int | None = None
    feature_names: list[str] = field(default_factory=list)
    pooling: str | None = None
    data_type: str | None = None
    init: InitConfig | None = None
    l2: float | None = None  # l2 * row is added to the gradient of each touched row
    sharding: ConstraintConfig | None = None
    compression: CompressionConfig | None = None
    tiers: TiersConfig | None = None  # None: completely in memory

    def __post_init__(self) -> None:
        check_at_least("num_embeddings", self.num_embeddings, 1, allow_none=True)
        check_at_least("embedding_dim", self.embedding_dim, 1, allow_none=True)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        if self.data_type is not None:
            check_choice("data_type", self.data_type, DATA_TYPES)
        check_at_least("l2", self.l2, 0.0, allow_none=True)


def table_name(entry: str) -> str:
    """Return TorchRec's name for the table of an entry or feature: the entry itself if possible.

    A module's name cannot contain a dot, be empty, or be a method of modules (type, items). Such a
    name is written with %2E for a dot and a % at its end, so different names stay different.
    entry_name reverses it.
    """
    if entry and "." not in entry and entry not in TAKEN and not entry.endswith("%") and not _ESCAPE.search(entry):
        return entry
    return entry.replace("%", "%25").replace(".", "%2E") + ("" if entry and entry not in TAKEN else "%")


def entry_name(table: str) -> str:
    """Return the entry or feature of the table with this name."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), table.removesuffix("%"))


def is_pattern(name: str) -> bool:
    """Return True if an entry's name is a pattern for several tables or features: cat_*, cat_?,
    cat_[0-4]."""
    return any(sign in name for sign in "*?[")


def matches(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """Return the names that fit `pattern`.

    Raises ConfigError if none does. `key` is the section, for the error.
    """
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigError(f"{key}.{pattern} matches no name{did_you_mean(pattern, names) or f': there are {names}'}")
    return found


def expand_patterns(tables: Mapping[str, TableConfig], features: Iterable[str]) -> dict[str, TableConfig]:
    """Return `tables` with an entry for every table that fits a pattern, and without the patterns.

    A table's own entry has priority, then patterns, then `default`. `features` are the data set's;
    a feature that no entry names has its own table.

    Raises:
        ConfigError: a pattern fits no table or sets feature_names, or two patterns give a table different
            values.
    """
    patterns = [name for name in tables if is_pattern(name)]
    own = {name: config for name, config in tables.items() if name not in patterns}
    named = {feature for name, config in own.items() if name != DEFAULT for feature in config.feature_names or [name]}
    names = [*(name for name in own if name != DEFAULT), *(feature for feature in features if feature not in named)]
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        if tables[pattern].feature_names:
            raise ConfigError(f"tables.{pattern}.feature_names: a pattern fits several tables; set it for one table")
        for name in matches(pattern, names, "tables"):
            found.setdefault(name, []).append(pattern)
    merged = {name: _merge(name, own.get(name, TableConfig()), fitting, tables) for name, fitting in found.items()}
    return {**own, **merged}


def _merge(name: str, own: TableConfig, patterns: list[str], tables: Mapping[str, TableConfig]) -> TableConfig:
    values: dict[str, object] = {}
    givers: dict[str, str] = {}
    for pattern in patterns:
        for setting in (each.name for each in fields(TableConfig)):
            value = getattr(tables[pattern], setting)
            if value in (None, []) or getattr(own, setting) not in (None, []):
                continue
            if setting in givers and value != values[setting]:
                raise ConfigError(
                    f"table {name!r} fits tables.{givers[setting]} and tables.{pattern}, which set {setting} to "
                    f"{values[setting]} and {value}; set tables.{name}.{setting}, or make one pattern narrower"
                )
            values[setting], givers[setting] = value, pattern
    return replace(own, **values)  # type: ignore[arg-type]


def rows_of_features(tables: dict[str, TableConfig]) -> dict[str, int]:
    """Return feature name -> rows of its table, for tables whose config sets num_embeddings."""
    return {
        feature: config.num_embeddings
        for name, config in tables.items()
        if config.num_embeddings is not None
        for feature in config.feature_names or [name]
    }
