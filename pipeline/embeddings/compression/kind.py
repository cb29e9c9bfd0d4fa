"""Define a compression kind: the interface of a table that is stored in fewer numbers (stdlib only).

A kind is one file. It registers a subclass of CompressionKind, and `tables.<name>.compression.kind=<name>` finds it:

    @register("compression", "modulo")
    class Modulo(CompressionKind): ...

A compressed table `cat_3` is stored as plain tables, its parts `cat_3__<part>` of features `<feature>__<part>`.
Planner, sharding, checkpoints and quantization treat them like all other tables. IdSplitter makes the parts'
ids, and Composer makes the table's rows from the parts' rows. Jobs are checked without torch, so numpy, torch
and torchrec are imported only inside methods that run in training.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pipeline.config.registry import find, register
from pipeline.config.tables import CompressionConfig, InitConfig
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table, by_position
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Bags(NamedTuple):
    """Hold the bags of a feature: ids [sum of lengths] int64, sorted by sample, and lengths [batch]
    int32.

    weights: float32, one per id; None: the weight of each id is 1.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None


# The bags of one feature -> (physical feature, its bags) for each of its parts.
Split = Callable[[Bags], Iterator[tuple[str, Bags]]]


class CompressionKind(ABC):
    """A table in the form in which its kind stores it. `key`: the table's config key, for errors."""

    # The fields of CompressionConfig that it uses in addition to kind, min_rows and options.
    settings: ClassVar[tuple[str, ...]] = ()
    # A dataclass of further settings, set as `compression.options`; None: no further settings.
    Options: ClassVar[type[Any] | None] = None
    # The part whose feature has each id of a bag once. It gives the length of a bag.
    id_part: ClassVar[str] = ""
    # Whether sequences may use this kind: each position is split and composed separately.
    fits_sequences: ClassVar[bool] = False
    # Whether `split` and `compose` multiply the row of each id by its weight.
    carries_weights: ClassVar[bool] = False

    def __init__(self, table: Table) -> None:
        self.table = table
        self.config = table.compression or CompressionConfig()
        self.key = f"tables.{table.config_name}.compression"

    @classmethod  # noqa: B027  # a kind may have nothing to check
    def check(cls, config: CompressionConfig) -> None:
        """Raise ConfigError if the settings are invalid for every table."""

    @property
    def is_for_size(self) -> bool:
        """Return whether tables.default applies this kind only to tables that become smaller."""
        return True

    @property
    def can_average(self) -> bool:
        """Return whether replicas may be averaged, because a row has the same ids in every replica."""
        return True

    @property
    def is_product(self) -> bool:
        """Return whether a row is a product of trained numbers. Zeros in all factors would then stay zeros."""
        return False

    @property
    def composes_each_id(self) -> bool:
        """Return whether the row of each id is composed before pooling, by the id's slot in its bag."""
        return False

    @abstractmethod
    def parts(self) -> list[Table]:
        """Return the tables that hold the rows. They may be compressed. Raises ConfigError if settings do not fit."""

    @abstractmethod
    def split(self, index: int) -> Split:
        """Return the function that maps the bags of feature number `index` to the bags of the parts."""

    def id_features(self, index: int) -> list[str]:
        """Return the features in which each id of feature number `index` occurs once after the split."""
        return [self.feature(index, self.id_part)]

    def often_empty_features(self) -> set[str]:
        """Return the features of parts in which many bags have no id, so that empty bags may be left out."""
        return set()

    # Dense parameters, and composed rows.

    def num_dense_numbers(self) -> int:
        """Return how many numbers `initial_parameters` has."""
        return 0

    def initial_parameters(self) -> dict[str, torch.Tensor]:
        """Return dense parameters sampled by torch's generator. Names with dots are those of nested modules."""
        return {}

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:
        """Return [batch, embedding_dim]: the pooled sum of each bag of feature number `index`.

        pooled: feature of a part -> [batch, columns of the part]. features: the batch after
        `split`. This default returns the pooled row of the part `id_part`.
        """
        return pooled[self.feature(index, self.id_part)]

    # Texts for logs, summaries and errors.

    @property
    def label(self) -> str:
        return self.config.kind

    @property
    def setting(self) -> str:
        """Return the name of the setting that decides how ids are composed, for errors."""
        return f"kind={self.config.kind}"

    def describe_dense(self, count: int) -> str:
        """Describe the `count` dense parameters in a few words."""
        return f"{count:,} dense parameters"

    def least_numbers(self) -> int | None:
        """Return how many numbers the smallest table of this kind without shared rows has, or None."""
        return None

    def shared_rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return for each id its row in the first part, or None if each id has a separate row."""
        return None

    # Checkpoints and artifacts.

    def assignments(self) -> Sequence[Sequence[int]]:
        """Return the classes of the ids if the settings do not contain them, so that a checkpoint can check them."""
        return []

    def embed_files(self) -> tuple[CompressionConfig, Sequence[Sequence[int]]]:
        """Return settings for an artifact that name no files, and the integers that the files contain."""
        return self.config, []

    @classmethod
    def restore_files(cls, config: CompressionConfig, numbers: list[list[int]]) -> CompressionConfig:
        """Undo `embed_files`: return settings that use `numbers` instead of files."""
        return config

    # Helpers for subclasses.

    @cached_property
    def options(self) -> Any:
        """Return the additional settings, an instance of `Options`."""
        return None if self.Options is None else self.config.read_options(self.Options)

    def feature(self, index: int, part: str, slot: int | None = None) -> str:
        """Return the part's feature for feature number `index`. `slot`: the position of an id in its bag."""
        name = f"{self.table.feature_names[index]}__{part}"
        return name if slot is None else f"{name}_{slot}"

    def slots(self, index: int) -> list[int] | list[None]:
        """Return the positions of ids in a bag; [None] if bags are pooled first or have one id.

        Raises ConfigError if ids are composed one by one, and lists may have any length.
        """
        if not self.composes_each_id:
            return [None]
        table = self.table
        limit = table.max_ids[index] if index < len(table.max_ids) else 1
        if limit is None:
            limit = self.config.max_ids_per_bag
        if limit is None:
            raise ConfigError(
                f"tables.{table.config_name}: feature {table.feature_names[index]!r} has lists, whose ids {self.setting} composes one "
                f"by one: set their maximum length by {self.key}.max_ids_per_bag=<ids>, or use operation=add "
                "or concatenate, which pool first"
            )
        return [None] if limit == 1 else list(range(limit))

    def part(
        self,
        name: str,
        num_rows: int,
        *,
        dim: int | None = None,
        std: float | None = None,
        frequencies: RowFrequencies | None = None,
        share: float = 1.0,
    ) -> Table:
        """Return a part that looks up `share` of the ids, initialized with `std`.

        dim and std are the table's if None. Parts pool by sum; a mean is divided after composing.
        """
        table = self.table
        features, factors = [], []
        for index, factor in enumerate(table.pooling_factors):
            slots = self.slots(index)
            features += [self.feature(index, name, slot) for slot in slots]
            factors += [share * factor / len(slots)] * len(slots)
        return replace(
            table,
            name=f"{table.name}__{name}",
            num_embeddings=num_rows,
            embedding_dim=dim or table.embedding_dim,
            feature_names=features,
            pooling="sum",
            init=_init_with(table.init, self.row_std() if std is None else std),
            pooling_factors=factors,
            frequencies=frequencies,
            compression=None,
            max_ids=[],
            part_of=table.whole_name,
            rows_of=None,
        )

    def row_std(self) -> float:
        """Return the standard deviation of the initial numbers of the table without compression."""
        init = self.table.init.scaled(self.table.num_embeddings, self.table.embedding_dim)
        if init.scale is None:
            return 0.0
        return init.scale if init.kind == "normal" else init.scale / math.sqrt(3)

    def budget(self) -> int | None:
        """Return how many numbers the table may have according to its ratio, or None without a ratio."""
        if self.config.ratio is None:
            return None
        return int(self.table.num_embeddings * self.table.embedding_dim / self.config.ratio)


@register("compression", "none")
class Whole(CompressionKind):
    """A table that is not compressed. Its only part is the table itself."""

    fits_sequences = True
    carries_weights = True

    def parts(self) -> list[Table]:
        return [self.table]

    def split(self, index: int) -> Split:
        feature = self.table.feature_names[index]
        return lambda bags: iter([(feature, bags)])

    def feature(self, index: int, part: str, slot: int | None = None) -> str:
        return self.table.feature_names[index]


def kind_of(config: CompressionConfig) -> type[CompressionKind]:
    """Return the class of a kind. Raises ConfigError if it is not registered."""
    kind: type[CompressionKind] = find("compression", config.kind, "compression.kind")
    return kind


def compressed(table: Table) -> CompressionKind:
    """Return the table in the form in which its kind stores it (or Whole), with sequences by position."""
    table = by_position(table)
    return Whole(table) if table.compression is None else kind_of(table.compression)(table)


def _init_with(init: InitConfig, std: float) -> InitConfig:
    if not std:
        return InitConfig("zeros")
    if init.kind in ("auto", "uniform", "xavier_uniform"):
        return InitConfig("uniform", std * math.sqrt(3))
    return InitConfig("normal", std)
