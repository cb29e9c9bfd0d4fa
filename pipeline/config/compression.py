"""Define the schema of `tables.<name>.compression`: one kind of smaller table with its settings (stdlib and OmegaConf only).

docs/do/embeddings.md says which kind when. A kind is a registered component: it says which of these settings it takes and checks
them. A kind from a plugin may take any of them, and brings further ones as `options`.
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
    """How a table's rows are stored in fewer numbers. Of the settings below a kind takes those that are its own.

    kind none: not at all, whatever tables.default says. Tables of fewer rows than `min_rows` stay as they are.
    ratio: how many times smaller than the full table; None where other settings give the sizes.
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
    dims: list[int] = field(default_factory=list)  # of each part, or block of mixed_dimension; empty: by other settings
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
    # What else a kind takes; the kind's `Options` names and types it, and a misspelt key is refused.
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
                f"compression.options={self.options}, but compression.kind={self.kind} takes none; leave them out"
            )
        kind.check(self)

    def read_options(self, options_type: type[Options]) -> Options:
        """`options` as the dataclass of the kind that takes them. Raises ConfigError for unknown keys and wrong types."""
        return read_settings(options_type, self.options, "compression.options", f"kind={self.kind}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values; without `options` where there are none, as it was before kinds could have them."""
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
