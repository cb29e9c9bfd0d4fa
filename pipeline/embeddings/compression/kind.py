"""Define what a compression kind is: everything that the pipeline asks of a table stored in fewer numbers (stdlib only).

A kind is one file. It registers a subclass of CompressionKind, and `tables.<name>.compression.kind=<name>` finds it:

    @register("compression", "modulo")
    class Modulo(CompressionKind): ...

A compressed table `cat_3` is stored as plain tables, its parts `cat_3__<part>` of features `<feature>__<part>`: to the
planner, to sharding, to checkpoints and to quantization these are tables as all others. IdSplitter makes the parts' ids,
Composer makes the table's rows of the parts' rows. Jobs are checked where there is no torch, so numpy, torch and torchrec are
imported inside the methods that run in training.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pipeline.config.compression import CompressionConfig
from pipeline.config.registry import find, register
from pipeline.config.tables import InitConfig
from pipeline.embeddings.positions import by_position
from pipeline.embeddings.row_frequencies import RowFrequencies
from pipeline.embeddings.table import Table
from pipeline.runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Bags(NamedTuple):
    """The bags of a feature: ids [sum of lengths] int64, sample after sample, and lengths [batch] int32.

    weights: float32, as many as ids; None: each counts 1.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None


# The bags of one feature -> (physical feature, its bags) for each of its parts.
Split = Callable[[Bags], Iterator[tuple[str, Bags]]]


class CompressionKind(ABC):
    """One table as its kind stores it. `config` is the table's compression, `key` its config key for errors."""

    # The fields of CompressionConfig that the kind takes beside `kind`, `min_rows` and `options`; others are refused.
    settings: ClassVar[tuple[str, ...]] = ()
    # A dataclass of settings of its own, given as `compression.options`; None: the kind has none.
    Options: ClassVar[type[Any] | None] = None
    # The part whose feature has each id of a bag once; says how long a bag is.
    id_part: ClassVar[str] = ""
    # Whether a table with sequences may be stored so: each position is split and composed by itself.
    fits_sequences: ClassVar[bool] = False
    # Whether `split` and `compose` keep the weights of ids: the row of each id counts as often as its weight says.
    carries_weights: ClassVar[bool] = False

    def __init__(self, table: Table) -> None:
        self.table = table
        self.config = table.compression or CompressionConfig()
        self.key = f"tables.{table.config_name}.compression"

    @classmethod  # noqa: B027  # a kind may have nothing to check
    def check(cls, config: CompressionConfig) -> None:
        """Raises ConfigError where the settings cannot be, whatever the table."""

    @property
    def is_for_size(self) -> bool:
        """tables.default leaves a table whole that its kind would not make smaller."""
        return True

    @property
    def can_average(self) -> bool:
        """Replicas of the table may be averaged: a row stands for the same ids on every host."""
        return True

    @property
    def is_product(self) -> bool:
        """A row is a product of trained numbers, so that zeros would stay zeros."""
        return False

    @property
    def composes_each_id(self) -> bool:
        """The rows of each id are composed before a bag is pooled, by one feature for each slot of a bag."""
        return False

    @abstractmethod
    def parts(self) -> list[Table]:
        """The tables that hold the rows; they may be compressed themselves. Raises ConfigError where settings do not fit."""

    @abstractmethod
    def split(self, index: int) -> Split:
        """How bags of the table's feature number `index` become those of the parts' features, in a fixed order."""

    def id_features(self, index: int) -> list[str]:
        """The features that together have each id of the table's feature number `index` once, after the split."""
        return [self.feature(index, self.id_part)]

    def often_empty_features(self) -> set[str]:
        """Parts' features of which many bags have no id, and which may leave those bags out."""
        return set()

    # Dense parameters, and rows made of the parts' rows.

    def num_dense_numbers(self) -> int:
        """How many numbers `initial_parameters` has."""
        return 0

    def initial_parameters(self) -> dict[str, torch.Tensor]:
        """The dense parameters beside the parts, sampled by torch's generator. Names with dots are of nested modules."""
        return {}

    def compose(
        self,
        parameters: Mapping[str, torch.Tensor],
        pooled: Mapping[str, torch.Tensor],
        features: KeyedJaggedTensor,
        index: int,
    ) -> torch.Tensor:
        """[batch, embedding_dim]: the sum of the rows of each bag of the table's feature number `index`.

        pooled: part's feature -> [batch, its part's columns]. features: what `split` made of the batch. A mean is taken
        afterwards. As it stands here: the pooled row of the part `id_part`.
        """
        return pooled[self.feature(index, self.id_part)]

    # What logs, summaries and errors say.

    @property
    def label(self) -> str:
        return self.config.kind

    @property
    def setting(self) -> str:
        """The setting that makes ids compose as they do, for errors."""
        return f"kind={self.config.kind}"

    def describe_dense(self, count: int) -> str:
        """The `count` dense parameters beside the parts, in a few words."""
        return f"{count:,} dense parameters"

    def least_numbers(self) -> int | None:
        """The numbers of the smallest table of this kind with a row for each id; None: the kind promises none."""
        return None

    def shared_rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The row of each id in the first part, where ids share rows; None: each id has a row of its own."""
        return None

    # Checkpoints and artifacts.

    def assignments(self) -> Sequence[Sequence[int]]:
        """Lists of classes by id that the settings do not say in full; they are part of what a checkpoint is checked by."""
        return []

    def embed_files(self) -> tuple[CompressionConfig, Sequence[Sequence[int]]]:
        """The settings for an artifact, which cannot point to a file, and the integers to store in the files' stead."""
        return self.config, []

    @classmethod
    def restore_files(cls, config: CompressionConfig, numbers: list[list[int]]) -> CompressionConfig:
        """The settings that `embed_files` was asked for, with its `numbers` in place of files."""
        return config

    # Tools of the kinds.

    @cached_property
    def options(self) -> Any:
        """The settings of the kind's own, an `Options`."""
        return None if self.Options is None else self.config.read_options(self.Options)

    def feature(self, index: int, part: str, slot: int | None = None) -> str:
        """The feature that a part embeds of the table's feature number `index`; `slot`: of an id in its bag."""
        name = f"{self.table.feature_names[index]}__{part}"
        return name if slot is None else f"{name}_{slot}"

    def slots(self, index: int) -> list[int] | list[None]:
        """The slots in a bag of the table's feature number `index`; [None] where bags are pooled first, or have one id.

        Raises:
            ConfigError: ids are composed one by one, and lists may have any length.
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
                f"by one: say how long they get by {self.key}.max_ids_per_bag=<ids>, or use operation=add "
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
        """A part that looks up `share` of the table's ids; its rows are initialized with standard deviation `std`.

        dim and std None: as the table's. Parts add up: a table's mean is the sum divided by the bag's length, after
        composing.
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
        """The standard deviation of the full table's numbers as initialized."""
        init = self.table.init.scaled(self.table.num_embeddings, self.table.embedding_dim)
        if init.scale is None:
            return 0.0
        return init.scale if init.kind == "normal" else init.scale / math.sqrt(3)

    def budget(self) -> int | None:
        """How many numbers the table may take by its ratio; None where it names none."""
        if self.config.ratio is None:
            return None
        return int(self.table.num_embeddings * self.table.embedding_dim / self.config.ratio)


@register("compression", "none")
class Whole(CompressionKind):
    """A table that is not compressed: its own only part."""

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
    """Raises ConfigError where no such kind is registered."""
    kind: type[CompressionKind] = find("compression", config.kind, "compression.kind")
    return kind


def compressed(table: Table) -> CompressionKind:
    """The table as its kind stores it, sequences by position; a table without compression is Whole."""
    table = by_position(table)
    return Whole(table) if table.compression is None else kind_of(table.compression)(table)


def _init_with(init: InitConfig, std: float) -> InitConfig:
    if not std:
        return InitConfig("zeros")
    if init.kind in ("auto", "uniform", "xavier_uniform"):
        return InitConfig("uniform", std * math.sqrt(3))
    return InitConfig("normal", std)
