"""Build an EmbeddingBagCollection on the meta device, and compose the rows of compressed tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.config.tables import InitConfig
from pipeline.embeddings.compression.kind import compressed
from pipeline.embeddings.id_splitter import sum_of_lengths
from pipeline.embeddings.physical import physical_tables
from pipeline.embeddings.table import COUNT_UNIT, Block, ManagedRows, Table, position_features, width_of

POOLING_TYPES = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


class Composer(nn.Module):
    """Compute a compressed table's pooled rows from its parts' pooled rows. Hold the table's dense parameters."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._kind = compressed(table)
        for name, value in self._kind.initial_parameters().items():
            _add_parameter(self, name, value)

    def id_features(self, index: int) -> list[str]:
        """Return the features in which each id of feature number `index` occurs once."""
        return self._kind.id_features(index)

    def forward(self, pooled: Mapping[str, torch.Tensor], features: KeyedJaggedTensor, index: int) -> torch.Tensor:
        """Return [batch, embedding_dim] of the table's feature number `index`.

        pooled: feature of a part -> [batch, columns of the part]. features: the ids after the
        split.
        """
        rows = self._kind.compose(dict(self.named_parameters()), pooled, features, index)
        if self._kind.table.pooling != "mean":
            return rows
        num_ids = sum_of_lengths(features, self._kind.id_features(index))
        return rows / num_ids.to(rows.dtype).clamp(min=1).unsqueeze(1)  # an empty bag stays 0


def _add_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Add a parameter. A `name` with dots is a parameter of nested modules."""
    first, _, remaining = name.partition(".")
    if not remaining:
        module.register_parameter(first, nn.Parameter(value))
        return
    if first not in dict(module.named_children()):
        module.add_module(first, nn.Module())
    _add_parameter(module.get_submodule(first), remaining, value)


class Composition(nn.Module):
    """Map pooled rows of parts and the features to a float32 KeyedTensor by features, in the order
    of `tables`.

    A sequence's columns are the rows of its positions, oldest first, then the number of ids. The
    row of a position without an id is zeros.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self._tables = list(tables)
        self._features = [feature for table in tables for feature in table.feature_names]
        self._dims = [width_of(table, feature) for table in tables for feature in table.feature_names]
        self.composers = nn.ModuleDict(
            {_key(table): Composer(table) for table in tables if table.compression is not None}
        )

    def forward(self, pooled: KeyedTensor, features: KeyedJaggedTensor) -> KeyedTensor:
        parts = pooled.to_dict()
        columns = []
        # In bf16 training this is as precise as tables that are looked up directly.
        with torch.autocast(features.device().type, enabled=False):
            for table in self._tables:
                composer = self.composers[_key(table)] if table.compression is not None else None
                read = {each.feature: each for each in table.positions}
                index = 0
                for feature in table.feature_names:
                    names = position_features(read[feature]) if feature in read else [feature]
                    if composer is None:
                        columns.append(_columns_of(pooled, names) if feature in read else parts[feature])
                    else:
                        columns += [composer(parts, features, index + number) for number in range(len(names))]
                    index += len(names)
                    if feature in read:
                        columns.append(self._count(features, composer, names, index))
        return KeyedTensor(self._features, self._dims, torch.cat(columns, dim=1))

    @staticmethod
    def _count(features: KeyedJaggedTensor, composer: nn.Module | None, names: list[str], end: int) -> torch.Tensor:
        """Return [batch, 2] float32: how many ids are at the positions `names`, as count // COUNT_UNIT and the rest."""
        if isinstance(composer, Composer):
            names = [name for index in range(end - len(names), end) for name in composer.id_features(index)]
        count = sum_of_lengths(features, names)
        return torch.stack([count // COUNT_UNIT, count % COUNT_UNIT], dim=1).to(torch.float32)


def _columns_of(pooled: KeyedTensor, names: list[str]) -> torch.Tensor:
    """Return the columns of keys as [batch, sum of dims]. Adjacent keys are not copied, others are concatenated."""
    keys, ends = pooled.keys(), pooled.offset_per_key()
    first = keys.index(names[0])
    if keys[first : first + len(names)] == names:
        return pooled.values()[:, ends[first] : ends[first + len(names)]]
    parts = pooled.to_dict()
    return torch.cat([parts[name] for name in names], dim=1)


def _key(table: Table) -> str:
    """Return the name of a table's module. Some names of tables are not allowed for modules (train, type, values)."""
    return f"{table.name}__parts"


class ComposedEmbeddings(nn.Module):
    """Look up plain and compressed tables: forward(split features) -> KeyedTensor by features.

    A model uses it like an EmbeddingBagCollection, after id_splitter.IdSplitter.
    """

    def __init__(self, tables: Sequence[Table], device: torch.device | None = None) -> None:
        super().__init__()
        self.embedding_bag_collection = build_embedding_bag_collection(physical_tables(tables), device)
        self.composition = Composition(tables)
        self._configs = [_config(table) for table in tables]
        #: feature -> columns of the output
        self.widths = {feature: width_of(table, feature) for table in tables for feature in table.feature_names}

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the logical tables."""
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        # A separate module, because TorchRec's train pipeline traces the modules around tables.
        composed: KeyedTensor = self.composition(self.embedding_bag_collection(features), features)
        return composed


class NoTables(EmbeddingBagCollection):
    """The lookup if there are no categorical features: forward(features) -> KeyedTensor [batch, 0].

    TorchRec's class would concatenate no tensors, which torch refuses. No sharder takes this class.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(tables=[], device=device or torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return KeyedTensor([], [], torch.empty(features.stride(), 0, device=features.device()))


def build_embeddings(
    tables: Sequence[Table], device: torch.device | None = None
) -> EmbeddingBagCollection | ComposedEmbeddings:
    """Build the lookup of a model's tables: forward(features) -> KeyedTensor by features.

    If there are no compressed tables and no sequences, it is a plain EmbeddingBagCollection.
    `device` None: meta.
    """
    if not tables:
        return NoTables(device)
    if any(table.compression is not None or table.positions for table in tables):
        return ComposedEmbeddings(tables, device)
    return build_embedding_bag_collection(tables, device)


def build_embedding_bag_collection(
    tables: Sequence[Table], device: torch.device | None = None
) -> EmbeddingBagCollection:
    """Return a collection with a config per table. `device` None: meta.

    Read the pooled KeyedTensor by key, because its order depends on the plan. If ids of any table
    have weights, the ids of all tables have weights, which are 1 by default.
    """
    return EmbeddingBagCollection(
        tables=[_config(table) for table in tables],
        device=device or torch.device("meta"),
        is_weighted=any(table.is_weighted for table in tables),
    )


def _config(table: Table) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=list(table.feature_names),
        pooling=POOLING_TYPES[table.pooling],
        data_type=DATA_TYPES[table.data_type],
        init_fn=_init_fn(table),
    )


@dataclass(frozen=True)
class RowsOf:
    """The init_fn of a part that holds rows of another table: the rows are initialized as in that table."""

    block: Block
    initialize: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return self.initialize(weight)


@dataclass(frozen=True)
class Managed:
    """The init_fn of rows that are given to ids during training (extras/managed_collision/managed_tables.py)."""

    rows: ManagedRows
    initialize: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return self.initialize(weight)


def _init_fn(table: Table) -> Callable[[torch.Tensor], torch.Tensor]:
    initialize = init_function(table.init, table.num_embeddings, table.embedding_dim)
    if table.managed is not None:
        return Managed(table.managed, initialize)
    return initialize if table.rows_of is None else RowsOf(table.rows_of, initialize)


@dataclass(frozen=True)
class Uniform:
    """An init_fn: fill a tensor with uniform numbers in [-bound, bound]."""

    bound: float

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return nn.init.uniform_(weight, -self.bound, self.bound)


@dataclass(frozen=True)
class Normal:
    """An init_fn: fill a tensor with normal numbers of mean 0."""

    std: float

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return nn.init.normal_(weight, std=self.std)


@dataclass(frozen=True)
class Zeros:
    """An init_fn: fill a tensor with zeros."""

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return nn.init.zeros_(weight)


def init_function(init: InitConfig, num_embeddings: int, embedding_dim: int) -> Uniform | Normal | Zeros:
    """Return a function that fills weights in place, by the scale of the complete table."""
    init = init.scaled(num_embeddings, embedding_dim)
    if init.scale is None:
        return Zeros()
    return Normal(init.scale) if init.kind == "normal" else Uniform(init.scale)
