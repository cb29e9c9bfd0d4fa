"""Define the schema of `tables.<name>.compression`: a kind of smaller table with its settings
(stdlib and OmegaConf only).

docs/do/embeddings.md describes when to use which kind. A kind is a registered component; it
declares which of these settings it uses and checks them. A kind of a plugin may use any of them,
and further settings in `options`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from pipeline.config.registry import components, find
from pipeline.config.settings import read_settings
from pipeline.runtime.errors import ConfigError, check_above, check_at_least

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
        """Return `options` as the dataclass of the kind.

        Raises ConfigError for unknown keys and wrong types.
        """
        return read_settings(options_type, self.options, "compression.options", f"kind={self.kind}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without `options` if it is empty.

        Records that were written before `options` existed have the same form.
        """
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
