"""Turn the pooled rows of tables' parts into those of the tables: a model sees logical features alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.embeddings.composer import Composer, PartitionComposer
from pipeline.embeddings.mixed_dimension import MixedDimension
from pipeline.embeddings.path_based import PathBased
from pipeline.embeddings.table import Table
from pipeline.embeddings.tensor_train import TensorTrainEmbedding


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


COMPOSERS: dict[str, Callable[[Table], Composer]] = {
    "hash": PartitionComposer,
    "quotient_remainder": PartitionComposer,
    "path_based": PathBased,
    "mixed_dimension": MixedDimension,
    "tensor_train": TensorTrainEmbedding,
}
