"""Turn the pooled rows of tables' parts into those of the tables: a model sees logical features alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.embeddings.compression.composer import (
    Composer,
    PartitionComposer,
    Pooled,
    mean_if_asked,
    sum_of_lengths,
)
from pipeline.embeddings.compression.frequency_split import COLD, HOT, cold_part, head_rows
from pipeline.embeddings.compression.managed_collision import MANAGED
from pipeline.embeddings.compression.mixed_dimension import MixedDimension
from pipeline.embeddings.compression.partitions import partitions_of
from pipeline.embeddings.compression.path_based import PathBased
from pipeline.embeddings.compression.physical import composes_each_id, feature_of, places_of
from pipeline.embeddings.compression.sizes import blocks_of
from pipeline.embeddings.compression.tensor_train import TensorTrainEmbedding
from pipeline.embeddings.table import Table


class Composition(nn.Module):
    """forward(pooled parts, features) -> KeyedTensor by logical features, in the order of `tables`, in float32."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self._tables = list(tables)
        self._features = [feature for table in tables for feature in table.feature_names]
        self._dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        self.composers = nn.ModuleDict(
            {_key(table): composer_of(table) for table in tables if table.compression is not None}
        )

    def forward(self, pooled: KeyedTensor, features: KeyedJaggedTensor) -> KeyedTensor:
        parts = pooled.to_dict()
        columns = []
        # As precise under bf16 as tables that are looked up whole.
        with torch.autocast(features.device().type, enabled=False):
            for table in self._tables:
                for index, feature in enumerate(table.feature_names):
                    composer = self.composers[_key(table)] if table.compression is not None else None
                    columns.append(parts[feature] if composer is None else composer(parts, features, index))
        return KeyedTensor(self._features, self._dims, torch.cat(columns, dim=1))


def _key(table: Table) -> str:
    """A module cannot be called as some tables are (train, type, values)."""
    return f"{table.name}__parts"


def composer_of(table: Table) -> Composer:
    assert table.compression is not None
    return COMPOSERS[table.compression.kind](table)


class SplitComposer(Composer):
    """Adds the hot head's part of each bag to the cold tail's."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._is_hot, cold = bool(head_rows(table)), cold_part(table)
        self._cold = cold
        self.tail = composer_of(cold) if cold is not None and cold.compression is not None else None

    def forward(self, pooled: Pooled, features: KeyedJaggedTensor, index: int) -> torch.Tensor:
        feature, parts, counted = self.table.feature_names[index], [], []
        if self._is_hot:
            counted.append(feature_of(feature, HOT))
            parts.append(pooled[feature_of(feature, HOT)])
        if self._cold is not None:
            counted += names_of_ids(self._cold, index)
            parts.append(pooled[feature_of(feature, COLD)] if self.tail is None else self.tail(pooled, features, index))
        return mean_if_asked(self.table, sum(parts[1:], parts[0]), lambda: sum_of_lengths(features, counted))


def names_of_ids(table: Table, index: int) -> list[str]:
    """The features that together have each id of the table's feature number `index` once, after the split."""
    feature, kind = table.feature_names[index], table.compression.kind if table.compression else "none"
    if kind == "none":
        return [feature]
    if kind == "managed_collision":
        return [feature_of(feature, MANAGED)]
    if kind == "path_based":
        return [feature_of(feature, "bucket")]
    if kind == "tensor_train":
        return [feature_of(feature, "cores")]
    if kind == "mixed_dimension":
        return [feature_of(feature, f"block_{number}") for number in range(len(blocks_of(table)))]
    part = partitions_of(table)[0].part
    places: Sequence[int | None] = places_of(table, index) if composes_each_id(table) else [None]
    return [feature_of(feature, part, place) for place in places]


class ManagedComposer(Composer):
    """The pooled rows as they are."""

    def forward(self, pooled: Pooled, features: KeyedJaggedTensor, index: int) -> torch.Tensor:
        name = feature_of(self.table.feature_names[index], MANAGED)
        return mean_if_asked(self.table, pooled[name], lambda: sum_of_lengths(features, [name]))


COMPOSERS: dict[str, Callable[[Table], Composer]] = {
    "managed_collision": ManagedComposer,
    "frequency_split": SplitComposer,
    "hash": PartitionComposer,
    "quotient_remainder": PartitionComposer,
    "path_based": PathBased,
    "mixed_dimension": MixedDimension,
    "tensor_train": TensorTrainEmbedding,
}
