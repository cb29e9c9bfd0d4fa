"""Split a batch's ids into the ids of its tables' parts, vectorised, before they go to the ranks that hold the rows.

The reader's thread does it in training, and the same code in serving.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.read.batch import keyed_jagged_tensor
from pipeline.embeddings.bags import leave_out_empty_bags
from pipeline.embeddings.compression.kind import Bags, compressed
from pipeline.embeddings.table import Table


class IdSplitter:
    """KeyedJaggedTensor by the data set's features -> KeyedJaggedTensor by the parts' features.

    On the CPU. Features of tables that are not compressed go through as they are; keys come in the same order in every
    batch. Beside the features that the collection looks up there are those of ids that dense parameters turn into rows.
    skip_empty_bags: leave out the tails' bags without ids, for ranks that would send them to each other.
    """

    def __init__(self, tables: Iterable[Table], *, skip_empty_bags: bool = False) -> None:
        kinds = [compressed(table) for table in tables if table.compression is not None]
        self._splits = {
            feature: kind.split(index) for kind in kinds for index, feature in enumerate(kind.table.feature_names)
        }
        self._skipped = {name for kind in kinds for name in kind.often_empty_features()} if skip_empty_bags else set()

    @property
    def features(self) -> frozenset[str]:
        """Whose ids become others."""
        return frozenset(self._splits)

    def __bool__(self) -> bool:
        """Whether there is anything to split."""
        return bool(self._splits)

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Raises ConfigError for a bag longer than the table's compression says."""
        if not self._splits:
            return features
        keys: list[str] = []
        parts: list[Bags] = []
        values, batch_size = features.values().numpy(), features.stride()
        lengths = features.lengths().numpy().reshape(-1, batch_size)
        begin = 0
        for index, (key, count) in enumerate(zip(features.keys(), features.length_per_key(), strict=True)):
            bags, begin = Bags(values[begin : begin + count], lengths[index]), begin + count
            for name, part in self._splits[key](bags) if key in self._splits else ((key, bags),):
                keys.append(name)
                parts.append(part)
        split = keyed_jagged_tensor(
            keys,
            torch.from_numpy(np.concatenate([part.ids for part in parts])),
            torch.from_numpy(np.concatenate([part.lengths for part in parts])),
            batch_size,
            [len(part.ids) for part in parts],
        )
        return leave_out_empty_bags(split, self._skipped) if self._skipped else split
