"""Make one table's pooled rows of its parts': what the composers of all kinds have in common, and that of partitions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from pipeline.embeddings.compression.partitions import partitions_of
from pipeline.embeddings.compression.physical import composes_each_id, feature_of, places_of
from pipeline.embeddings.table import Table

Pooled = Mapping[str, torch.Tensor]  # physical feature -> [batch, its part's columns]


class Composer(nn.Module, ABC):
    """Makes one table's pooled rows of its parts'; subclasses say how."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table

    @abstractmethod
    def forward(self, pooled: Pooled, features: KeyedJaggedTensor, index: int) -> torch.Tensor:
        """[batch, embedding_dim] of the table's feature number `index`; `features` are what the ids were split into."""


def mean_if_asked(table: Table, summed: torch.Tensor, num_ids: Callable[[], torch.Tensor]) -> torch.Tensor:
    """[batch, D] divided by each bag's `num_ids` [batch] where the table pools by mean; an empty bag stays 0."""
    if table.pooling != "mean":
        return summed
    return summed / num_ids().to(summed.dtype).clamp(min=1).unsqueeze(1)


def sum_of_lengths(features: KeyedJaggedTensor, names: Sequence[str]) -> torch.Tensor:
    """[batch]: how many ids the features have together, of every sample, also where empty bags are left out."""
    keys = features.keys()
    if not features.variable_stride_per_key():
        lengths = features.lengths().view(-1, features.stride())
        return lengths[[keys.index(name) for name in names]].sum(dim=0)
    by_key = dict(zip(keys, features.lengths().split(features.stride_per_key()), strict=True))
    bags = dict(zip(*features.inverse_indices(), strict=True))
    return torch.stack([by_key[name][bags[name]] for name in names]).sum(dim=0)


def pool_rows(rows: torch.Tensor, bags: JaggedTensor) -> torch.Tensor:
    """rows [ids, D] of the ids in `bags`, one bag after the other -> their sums [batch, D]."""
    lengths = bags.lengths()
    samples = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths, output_size=len(rows))
    return rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, samples, rows)


class PartitionComposer(Composer):
    """Adds, multiplies or concatenates the rows of the classes that partitions put an id into."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        assert table.compression is not None
        self._operation = table.compression.operation
        self._parts = [partition.part for partition in partitions_of(table)]
        self._each_id = composes_each_id(table)

    def forward(self, pooled: Pooled, features: KeyedJaggedTensor, index: int) -> torch.Tensor:
        feature = self.table.feature_names[index]
        places: Sequence[int | None] = places_of(self.table, index) if self._each_id else [None]
        composed = self._compose(pooled, feature, places[0])
        for place in places[1:]:
            composed = composed + self._compose(pooled, feature, place)
        names = [feature_of(feature, self._parts[0], place) for place in places]
        return mean_if_asked(self.table, composed, lambda: sum_of_lengths(features, names))

    def _compose(self, pooled: Pooled, feature: str, place: int | None) -> torch.Tensor:
        rows = [pooled[feature_of(feature, part, place)] for part in self._parts]
        if self._operation == "concatenate":
            return torch.cat(rows, dim=1)
        composed = rows[0]
        for row in rows[1:]:
            composed = composed + row if self._operation == "add" else composed * row
        return composed
