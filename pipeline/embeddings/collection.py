"""Turn resolved tables into an EmbeddingBagCollection on the meta device, and what composes the parts of compressed ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.config.tables import InitConfig
from pipeline.embeddings.compression.composition import Composition
from pipeline.embeddings.compression.physical import physical_tables
from pipeline.embeddings.table import Block, ManagedRows, Table

POOLING_TYPES = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


class ComposedEmbeddings(nn.Module):
    """Plain tables and what makes compressed ones of them: forward(split features) -> KeyedTensor by logical features.

    For a model it stands where an EmbeddingBagCollection would; its ids go through id_splitter.IdSplitter first.
    """

    def __init__(self, tables: Sequence[Table], device: torch.device | None = None) -> None:
        super().__init__()
        self.embedding_bag_collection = build_embedding_bag_collection(physical_tables(tables), device)
        self.composition = Composition(tables)
        self._configs = [_config(table) for table in tables]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Of the logical tables."""
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        # The composition is a module of its own, without tables: TorchRec's train pipeline traces what is around it.
        composed: KeyedTensor = self.composition(self.embedding_bag_collection(features), features)
        return composed


def build_embeddings(
    tables: Sequence[Table], device: torch.device | None = None
) -> EmbeddingBagCollection | ComposedEmbeddings:
    """What a model looks its tables up in: forward(features) -> KeyedTensor by logical feature names.

    A plain EmbeddingBagCollection where no table is compressed. `device` None: tables on meta.
    """
    if any(table.compression is not None for table in tables):
        return ComposedEmbeddings(tables, device)
    return build_embedding_bag_collection(tables, device)


def build_embedding_bag_collection(
    tables: Sequence[Table], device: torch.device | None = None
) -> EmbeddingBagCollection:
    """One EmbeddingBagConfig a table. `device` None: meta, no memory is allocated before sharding.

    The pooled output is a KeyedTensor by feature name; its order of values depends on the plan, so read it by key.
    """
    return EmbeddingBagCollection(tables=[_config(table) for table in tables], device=device or torch.device("meta"))


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
    """An init_fn of rows that are another table's: the same draw, of that table's blocks (training/table_init.py)."""

    block: Block
    draw: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return self.draw(weight)


@dataclass(frozen=True)
class Managed:
    """An init_fn of rows that are given to ids as they come, and drawn again for each (training/managed_rows.py)."""

    rows: ManagedRows
    draw: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return self.draw(weight)


def _init_fn(table: Table) -> Callable[[torch.Tensor], torch.Tensor]:
    draw = init_function(table.init, table.num_embeddings, table.embedding_dim)
    if table.managed is not None:
        return Managed(table.managed, draw)
    return draw if table.rows_of is None else RowsOf(table.rows_of, draw)


def init_function(init: InitConfig, num_embeddings: int, embedding_dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fills a table's weights in place. The scale follows the whole table, not the shard at hand."""
    if init.kind == "zeros":
        return torch.nn.init.zeros_
    if init.kind == "normal":
        return partial(torch.nn.init.normal_, std=init.scale or 1 / math.sqrt(embedding_dim))
    scale = init.scale or 1 / math.sqrt(num_embeddings)
    return partial(torch.nn.init.uniform_, a=-scale, b=scale)
