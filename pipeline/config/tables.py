"""Define embedding tables: `tables.<name>` of a job (stdlib only).

The entry `default` supplies unset values of all tables. An entry such as `cat_*` supplies them for
tables whose names fit, and has priority over `default`. A table without feature_names embeds the
feature with the table's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from pipeline.config.registry import components, find, read_settings
from pipeline.runtime.errors import ConfigError, check_above, check_at_least, check_choice, check_within, did_you_mean

AUTO = "auto"
ANY_KIND = ("kind", "min_rows", "options")

Options = TypeVar("Options")


@dataclass
class CompressionConfig:
    """How a table's rows are stored in fewer numbers. Each kind uses some of the settings below.

    kind=none: no compression, even if tables.default has one. Tables with fewer than `min_rows`
    rows are not compressed. ratio: size of the full table divided by the compressed size; None if
    other settings give the sizes.
    """

    kind: str = "none"
    min_rows: int = 0
    ratio: float | None = None
    num_rows: int | None = None  # of the hashed table, or of the base table of path_based
    seed: int = 0  # of the hash
    # quotient_remainder (arXiv 1909.02107). `bases`: the number of classes of each partition of the
    # ids.
    scheme: str = "quotient_remainder"
    num_partitions: int | None = None  # None: the number of bases, or 2
    bases: list[int] = field(default_factory=list)
    operation: str = "add"
    # of each part, or of each block of mixed_dimension; empty: derived from other settings
    dims: list[int] = field(default_factory=list)
    assignments: list[list[int]] = field(default_factory=list)  # scheme given: [partition][id] -> class
    assignments_file: str | None = None  # the same as a .npy file of integers
    # for lists whose ids are composed one by one; a longer list stops the run
    max_ids_per_bag: int | None = None
    hidden_size: int = 16  # path_based: size of the small network of each bucket
    # mixed_dimension (arXiv 1909.11810): the number of columns is proportional to popularity **
    # temperature
    num_blocks: int | None = None
    temperature: float | None = None
    # tensor_train (arXiv 2101.11714): three cores
    rank: int | None = None
    row_factors: list[int] = field(default_factory=list)
    dim_factors: list[int] = field(default_factory=list)
    # frequency_split (arXiv 2201.10095, 2411.01611). `head_rows`: a number, or `auto` for the fewest bytes on the wire.
    head_rows: str = AUTO
    head_sharding_types: list[str] = field(default_factory=lambda: ["data_parallel"])
    # None: not compressed, sharded by the table's own `sharding`
    tail: CompressionConfig | None = None
    skip_empty_bags: bool = True  # bags without a tail id send nothing
    # managed_collision: TorchRec's MCH. Every eviction_interval steps each bucket chooses the ids
    # that have their own rows.
    policy: str = "lfu"
    eviction_interval: int = 100
    buckets: int = 8  # a multiple of every number of ranks that the run will use
    # Further settings of a kind; the kind's `Options` declares them, and unknown keys are an error.
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = find("compression", self.kind, "compression.kind")
        self.head_rows = str(self.head_rows)
        check_at_least("compression.min_rows", self.min_rows, 0)
        check_at_least("compression.seed", self.seed, 0)
        if self.ratio is not None:
            check_above("compression.ratio", self.ratio, 1.0)
        for name in ("num_rows", "max_ids_per_bag", "num_blocks", "rank"):
            check_at_least(f"compression.{name}", getattr(self, name), 1, allow_none=True)
        for name in ("bases", "dims", "row_factors", "dim_factors"):
            for value in getattr(self, name):
                check_at_least(f"each of compression.{name}", value, 1)
        self._refuse_settings_of_other_kinds(kind.settings)
        if kind.Options is not None:
            self.read_options(kind.Options)
        elif self.options:
            raise ConfigError(
                f"compression.options={self.options}, but compression.kind={self.kind} has no options; leave them out"
            )
        kind.check(self)

    def read_options(self, options_type: type[Options]) -> Options:
        """Return `options` as the dataclass of the kind. Raises ConfigError for unknown keys and
        wrong types."""
        return read_settings(options_type, self.options, "compression.options", f"kind={self.kind}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without `options` if it is empty. Records that were written before
        `options` existed have the same form."""
        return _without_no_options(asdict(self))

    def _refuse_settings_of_other_kinds(self, own: Sequence[str]) -> None:
        defaults = {
            each.name: each.default_factory() if callable(each.default_factory) else each.default
            for each in fields(self)
        }
        for name, value in vars(self).items():
            if name in ANY_KIND or name in own or value == defaults[name]:
                continue
            owners = [kind for kind, component in components("compression").items() if name in component.settings]
            raise ConfigError(
                f"compression.{name}={value} is a setting of {', '.join(owners) or 'an extra that is not installed'}, but compression.kind={self.kind}; "
                f"leave it out, or set kind={next(iter(owners), '...')}"
            )


def _without_no_options(values: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in values.items() if name != "options" or value}
    return {**values, "tail": _without_no_options(values["tail"])} if values["tail"] else values


# Names that a submodule of a torch ModuleDict cannot have: attributes of ModuleDict. A test compares them with torch.
TAKEN = frozenset(
    [
        "T_destination",
        "__annotations__",
        "__call__",
        "__class__",
        "__contains__",
        "__delattr__",
        "__delitem__",
        "__dict__",
        "__dir__",
        "__doc__",
        "__eq__",
        "__format__",
        "__ge__",
        "__getattr__",
        "__getattribute__",
        "__getitem__",
        "__getstate__",
        "__gt__",
        "__hash__",
        "__init__",
        "__init_subclass__",
        "__iter__",
        "__le__",
        "__len__",
        "__lt__",
        "__module__",
        "__ne__",
        "__new__",
        "__reduce__",
        "__reduce_ex__",
        "__repr__",
        "__setattr__",
        "__setitem__",
        "__setstate__",
        "__sizeof__",
        "__str__",
        "__subclasshook__",
        "__weakref__",
        "_apply",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_call_impl",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_get_backward_hooks",
        "_get_backward_pre_hooks",
        "_get_name",
        "_is_full_backward_hook",
        "_load_from_state_dict",
        "_load_state_dict_post_hooks",
        "_load_state_dict_pre_hooks",
        "_maybe_warn_non_full_backward_hook",
        "_modules",
        "_named_members",
        "_non_persistent_buffers_set",
        "_parameters",
        "_register_load_state_dict_pre_hook",
        "_register_state_dict_hook",
        "_replicate_for_data_parallel",
        "_save_to_state_dict",
        "_slow_forward",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_version",
        "_wrapped_call_impl",
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "call_super_init",
        "children",
        "clear",
        "compile",
        "cpu",
        "cuda",
        "double",
        "dump_patches",
        "eval",
        "extra_repr",
        "float",
        "forward",
        "get_buffer",
        "get_extra_state",
        "get_parameter",
        "get_submodule",
        "half",
        "ipu",
        "items",
        "keys",
        "load_state_dict",
        "modules",
        "mtia",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "pop",
        "register_backward_hook",
        "register_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_module",
        "register_parameter",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "requires_grad_",
        "set_extra_state",
        "set_submodule",
        "share_memory",
        "state_dict",
        "to",
        "to_empty",
        "train",
        "training",
        "type",
        "update",
        "values",
        "xpu",
        "zero_grad",
    ]
)


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

    file: vectors that replace the initial rows of the ids with the same values. A Parquet file has
    a value and a list of numbers in each row; in a .npy file the number of a row is its value.
    Vectors that are narrower than the rows fill their first columns.
    """

    kind: str = "auto"
    scale: float | None = None
    file: str | None = None
    value_column: str = "value"
    vector_column: str = "vector"

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
    """Choices of the planner for a table. Empty lists allow everything that the backend
    supports."""

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
    """Return the number of rows of a shard with reserved slots (TiersConfig.head). At least two
    slots stay for other rows."""
    return max(0, min(int(head * slots), slots - 2))


DEFAULT = "default"
_ESCAPE = re.compile("%(25|2E)")


@dataclass
class TableConfig:
    """One table. None means the value of `tables.default`; for num_embeddings it means the data
    set's cardinality."""

    num_embeddings: int | None = None
    embedding_dim: int | None = None
    feature_names: list[str] = field(default_factory=list)
    pooling: str | None = None
    data_type: str | None = None
    init: InitConfig | None = None
    l2: float | None = None  # l2 * row is added to the gradient of each touched row
    weight_decay: float | None = None  # None: optimizer.sparse.weight_decay
    lr_factor: float | None = None  # multiplies the learning rate of optimizer.sparse
    warmup_steps: int | None = None  # steps of a linear rise of the table's rate, next to the schedule
    frozen: bool | None = None  # rows are never updated
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
        for name in ("l2", "weight_decay", "warmup_steps"):
            check_at_least(name, getattr(self, name), 0, allow_none=True)
        if self.lr_factor is not None and not self.lr_factor > 0:
            raise ConfigError(f"lr_factor={self.lr_factor:g} must be above 0; frozen=true keeps rows unchanged")


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
    """Return the names that fit `pattern`. Raises ConfigError if none does. `key` is the section,
    for the error."""
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigError(f"{key}.{pattern} matches no name{did_you_mean(pattern, names) or f': there are {names}'}")
    return found


def expand_patterns(tables: Mapping[str, TableConfig], features: Iterable[str]) -> dict[str, TableConfig]:
    """Return `tables` with an entry for every table that fits a pattern, and without the patterns.
    A table's own entry has priority, then patterns, then `default`. `features` are the data set's;
    a feature that no entry names has its own table. Raises ConfigError if a pattern fits no table
    or sets feature_names, or two patterns give a table different values."""
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
