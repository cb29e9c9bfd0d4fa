"""Read the prepared rows on which an artifact is compared with its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.data import ReaderConfig
from pipeline.data.dataset import Dataset
from pipeline.data.read.reader import ShardReader
from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.composed import ComposedTables
from pipeline.serving.artifact.kept_rows import KeptRows, RowMask
from pipeline.serving.scoring.lookup import ServedFeature

BATCH_ROWS = 2048


@dataclass(frozen=True)
class SampleBatch:
    """dense [batch, num_dense] float32, values and offsets as a KeyedJaggedTensor has them, labels [batch];
    `real` [batch] bool: neither padding nor quarantined. `compose` makes of pooled parts what the layers take."""

    dense: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    labels: torch.Tensor
    real: torch.Tensor
    compose: Callable[[torch.Tensor], torch.Tensor] = lambda pooled: pooled

    def rows(self, pooled: Callable[[SampleBatch], torch.Tensor]) -> torch.Tensor:
        """[batch, sum of dims] for the layers; a model without tables looks nothing up."""
        if len(self.offsets) == 1:
            return torch.empty(len(self.labels), 0)
        return self.compose(pooled(self))


@dataclass(frozen=True)
class Sample:
    """The first rows of a split, in the order of its files."""

    split: str
    batches: list[SampleBatch]

    @property
    def labels(self) -> NDArray[np.float64]:
        return torch.cat([batch.labels[batch.real] for batch in self.batches]).double().numpy()

    def score(self, program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], pooled: Callable[[SampleBatch], torch.Tensor]) -> NDArray[np.float64]:  # fmt: skip
        """The probabilities of its real rows, float64 of the program's float32 logits, as the metrics take them."""
        with torch.no_grad():
            logits = [program(batch.dense, batch.rows(pooled))[batch.real] for batch in self.batches]
        return torch.sigmoid(torch.cat(logits).double()).numpy()


def read_sample(
    folder: str,
    dataset: Dataset,
    split: str,
    max_rows: int,
    config: ReaderConfig,
    multi_hot: dict[str, int],
    keys: list[str],
    composed: ComposedTables | None,
) -> Sample:
    """`keys`: the features that the model reads. `composed` makes of them those that the collection looks up; None: they are."""
    in_order = replace(config, shuffle="none", num_streams=1, decode_threads=1)
    rows = min(BATCH_ROWS, max_rows)
    reader = ShardReader(
        folder, dataset, split, global_batch_size=rows, rank=0, world_size=1, config=in_order, seed=0,
        multi_hot=multi_hot, drop_last=False,
    )  # fmt: skip
    batches, left, source = [], max_rows, reader.batches(epoch=0)
    try:
        for batch in source:
            real = (batch.sample_weights > 0) & (torch.arange(batch.batch_size) < left)
            sparse = batch.sparse_features
            if sparse.keys() != keys:
                sparse = sparse.permute([sparse.keys().index(key) for key in keys])
            if composed is None:
                ids = sparse.values(), sparse.offsets().long()
                batches.append(SampleBatch(batch.dense_features, *ids, batch.labels, real))
            else:
                split = composed.split(sparse)
                compose = partial(composed.compose, split=split)
                batches.append(
                    SampleBatch(batch.dense_features, *composed.ids_looked_up(split), batch.labels, real, compose)
                )
            left -= batch.batch_size
            if left <= 0:
                break
    finally:
        source.close()
    return Sample(split, batches)


def used_rows(samples: Iterable[Sample], features: Sequence[ServedFeature], rows: Sequence[int]) -> list[KeptRows]:
    """Of each table, `rows` many each, those that the samples look up. Raises ServingError for ids outside their table."""
    masks = [RowMask(num_rows) for num_rows in rows]
    for sample in samples:
        for batch in sample.batches:
            size = len(batch.labels)
            ends = batch.offsets[::size].tolist()
            for feature, begin, end in zip(features, ends, ends[1:], strict=False):
                ids = batch.values[begin:end].numpy()
                if len(ids) and (ids.min() < 0 or ids.max() >= rows[feature.table]):
                    raise ServingError(
                        f"feature {feature.name!r} has ids up to {ids.max()}, its table has {rows[feature.table]} rows: "
                        "these are not the data that the run was trained on"
                    )
                masks[feature.table].add(ids)
    return [mask.finish() for mask in masks]
