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
    """The bags of a feature: ids [sum of lengths] int64 by sample, lengths [batch] int32.

    weights: float32, one per id; None: each counts 1.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None


# The bags of one feature -> (physical feature, its bags) for each of its parts.
Split = Callable[[Bags], Iterator[tuple[str, Bags]]]


class CompressionKind(ABC):
    """One table in the form its kind stores. `key`: its config key, for errors."""

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
        """Return True if tables.default applies it only to tables that get smaller."""
        return True

    @property
    def can_average(self) -> bool:
        """Return True if replicas may be averaged: rows mean the same ids everywhere."""
        return True

    @property
    def is_product(self) -> bool:
        """Return True if a row is a product of trained numbers, so zeros would stay zeros."""
        return False

    @property
    def composes_each_id(self) -> bool:
        """Return True if each id is composed before pooling, by its slot of a bag."""
        return False

    @abstractmethod
    def parts(self) -> list[Table]:
        """Return the tables with the rows, maybe compressed. ConfigError if settings do not fit."""

    @abstractmethod
    def split(self, index: int) -> Split:
        """Return the function from bags of feature number `index` to the parts' bags."""

    def id_features(self, index: int) -> list[str]:
        """Return the features that have each id of feature number `index` once, split."""
        return [self.feature(index, self.id_part)]

    def often_empty_features(self) -> set[str]:
        """Return the parts' features whose bags often have no id and may be left out."""
        return set()

    # Dense parameters, and composed rows.

    def num_dense_numbers(self) -> int:
        """Return how many numbers `initial_parameters` has."""
        return 0

    def initial_parameters(self) -> dict[str, torch.Tensor]:
        """Return dense parameters, sampled by torch's generator. Dots in names: nested modules."""
        return {}

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:
        """Return [batch, embedding_dim]: the sums of the bags of feature number `index`.

        pooled: part's feature -> [batch, its columns]. features: the batch after `split`. This
        default returns the pooled row of the part `id_part`.
        """
        return pooled[self.feature(index, self.id_part)]

    # Texts for logs, summaries and errors.

    @property
    def label(self) -> str:
        return self.config.kind

    @property
    def setting(self) -> str:
        """Return the setting that decides how ids are composed, for errors."""
        return f"kind={self.config.kind}"

    def describe_dense(self, count: int) -> str:
        """Describe the `count` dense parameters in a few words."""
        return f"{count:,} dense parameters"

    def least_numbers(self) -> int | None:
        """Return the numbers of this kind's smallest table without shared rows, or None."""
        return None

    def shared_rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the row of each id in the first part; None if each id has its own row."""
        return None

    # Checkpoints and artifacts.

    def assignments(self) -> Sequence[Sequence[int]]:
        """Return classes by id that the settings lack, for a checkpoint's check."""
        return []

    def embed_files(self) -> tuple[CompressionConfig, Sequence[Sequence[int]]]:
        """Return settings for an artifact, without files, and the integers of these files."""
        return self.config, []

    @classmethod
    def restore_files(cls, config: CompressionConfig, numbers: list[list[int]]) -> CompressionConfig:
        """Return the settings before `embed_files`, with its `numbers` instead of files."""
        return config

    # Helpers for subclasses.

    @cached_property
    def options(self) -> Any:
        """Return the further settings, an instance of `Options`."""
        return None if self.Options is None else self.config.read_options(self.Options)

    def feature(self, index: int, part: str, slot: int | None = None) -> str:
        """Return the feature of a part for feature number `index`. `slot`: of an id in its bag."""
        name = f"{self.table.feature_names[index]}__{part}"
        return name if slot is None else f"{name}_{slot}"

    def slots(self, index: int) -> list[int] | list[None]:
        """Return the slots of a bag; [None] if bags are pooled first, or have one id.

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

        dim and std None: same as the table. Parts are added up; means are divided after composing.
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
        """Return the standard deviation of the full table's initial numbers."""
        init = self.table.init.scaled(self.table.num_embeddings, self.table.embedding_dim)
        if init.scale is None:
            return 0.0
        return init.scale if init.kind == "normal" else init.scale / math.sqrt(3)

    def budget(self) -> int | None:
        """Return how many numbers the table may have by its ratio; None without a ratio."""
        if self.config.ratio is None:
            return None
        return int(self.table.num_embeddings * self.table.embedding_dim / self.config.ratio)


@register("compression", "none")
class Whole(CompressionKind):
    """A table that is not compressed. It is its only part."""

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
    """Return the table in the form its kind stores (Whole without), with sequences by position."""
    table = by_position(table)
    return Whole(table) if table.compression is None else kind_of(table.compression)(table)


def _init_with(init: InitConfig, std: float) -> InitConfig:
    if not std:
        return InitConfig("zeros")
    if init.kind in ("auto", "uniform", "xavier_uniform"):
        return InitConfig("uniform", std * math.sqrt(3))
    return InitConfig("normal", std)
