"""Schemas of embedding tables: `tables.<name>` of a job (stdlib only).

The entry `default` supplies what a table leaves unset; an entry `cat_*` does so for tables whose names fit, before it. A table without feature_names embeds the feature of its own name.
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
# What TorchRec has a name for and nothing to run: https://github.com/pytorch/FBGEMM/issues/5666
NOT_IN_FBGEMM = "key_value"


@dataclass
class InitConfig:
    """uniform: in [-scale, scale], scale None = 1/sqrt(num_embeddings); normal: std = scale, None = 1/sqrt(embedding_dim).

    xavier_uniform and xavier_normal: scale times those of a layer of num_embeddings inputs and embedding_dim outputs, None = 1
    (Glorot and Bengio, AISTATS 2010). The table is the whole one, whatever its shards.
    auto: as the model's config says (ModelConfig.table_init), at `scale` where it is given; with no model, uniform.
    """

    kind: str = "auto"
    scale: float | None = None

    def __post_init__(self) -> None:
        check_choice("init.kind", self.kind, INITS)
        if self.scale is not None:
            check_above("init.scale", self.scale, 0.0)

    def scaled(self, num_embeddings: int, embedding_dim: int) -> InitConfig:
        """The same as zeros, or as uniform or normal with the scale of a table of that size."""
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
    """What the planner may choose for a table; empty lists allow all that the backend can do."""

    sharding_types: list[str] = field(default_factory=list)
    compute_kernels: list[str] = field(default_factory=list)
    min_partition: int | None = None  # narrowest column shard

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
    """Keep some of a table's rows in memory and all that were trained on a local SSD (sharding.tier_folder).

    slots: below 1, the share of the rows that memory holds; above 1, how many; 1: all, as without tiers. A table of fewer than
    min_rows rows stays in memory whole. head: the share of a shard's slots that its first rows keep whatever is looked up; None:
    half where the data's ids come by descending frequency, else 0.
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
    """Of a shard with some of the table's rows: its part of the table's slots (TiersConfig.slots), and one at least."""
    share = slots if slots <= 1 else slots / table_rows
    return min(shard_rows, max(1, math.ceil(share * shard_rows - 1e-9)))


def head_rows(head: float, slots: int) -> int:
    """How many rows of a shard with so many slots keep theirs (TiersConfig.head); other rows have two slots at least."""
    return max(0, min(int(head * slots), slots - 2))


DEFAULT = "default"
_ESCAPE = re.compile("%(25|2E)")


@dataclass
class TableConfig:
    """One table. None means: as `tables.default` says, and for num_embeddings: as the data set's cardinality says."""

    num_embeddings: int | None = None
    embedding_dim: int | None = None
    feature_names: list[str] = field(default_factory=list)
    pooling: str | None = None
    data_type: str | None = None
    init: InitConfig | None = None
    l2: float | None = None  # the gradient of a row that a step touches gains l2 times the row
    sharding: ConstraintConfig | None = None
    compression: CompressionConfig | None = None
    tiers: TiersConfig | None = None  # None: in memory whole

    def __post_init__(self) -> None:
        check_at_least("num_embeddings", self.num_embeddings, 1, allow_none=True)
        check_at_least("embedding_dim", self.embedding_dim, 1, allow_none=True)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        if self.data_type is not None:
            check_choice("data_type", self.data_type, DATA_TYPES)
        check_at_least("l2", self.l2, 0.0, allow_none=True)


def table_name(entry: str) -> str:
    """The name under which TorchRec holds the table of an entry, or of a feature that has none: `entry` itself wherever that can be.

    No module can have a dot in its name, be called as a method of modules (type, items), or have no name. Such a name is
    written with %2E for a dot and a % at its end, so that names stay apart; entry_name undoes it.
    """
    if entry and "." not in entry and entry not in TAKEN and not entry.endswith("%") and not _ESCAPE.search(entry):
        return entry
    return entry.replace("%", "%25").replace(".", "%2E") + ("" if entry and entry not in TAKEN else "%")


def entry_name(table: str) -> str:
    """The entry, or the feature, whose table has this name."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), table.removesuffix("%"))


def is_pattern(name: str) -> bool:
    """Whether an entry's name stands for several tables or features: cat_*, cat_?, cat_[0-4]."""
    return any(sign in name for sign in "*?[")


def matches(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """The names that `pattern` stands for. Raises ConfigError for none; `key` is the section of the pattern."""
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigError(f"{key}.{pattern} fits no name{did_you_mean(pattern, names) or f': there are {names}'}")
    return found


def expand_patterns(tables: Mapping[str, TableConfig], features: Iterable[str]) -> dict[str, TableConfig]:
    """`tables` with an entry for every table that a pattern fits, and without the patterns.

    A table's own entry comes first, then patterns, then `default`. `features` are the data set's: a feature that no entry
    names has a table of its own.

    Raises:
        ConfigError: a pattern fits no table or sets feature_names, or two patterns give a table different values.
    """
    patterns = [name for name in tables if is_pattern(name)]
    own = {name: config for name, config in tables.items() if name not in patterns}
    named = {feature for name, config in own.items() if name != DEFAULT for feature in config.feature_names or [name]}
    names = [*(name for name in own if name != DEFAULT), *(feature for feature in features if feature not in named)]
    found: dict[str, list[str]] = {}
    for pattern in patterns:
        if tables[pattern].feature_names:
            raise ConfigError(f"tables.{pattern}.feature_names: a pattern stands for several tables, name one of them")
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
    """Feature name -> rows of its table, where the config says them."""
    return {
        feature: config.num_embeddings
        for name, config in tables.items()
        if config.num_embeddings is not None
        for feature in config.feature_names or [name]
    }
