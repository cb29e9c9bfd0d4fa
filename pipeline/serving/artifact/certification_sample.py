"""Read the prepared rows on which an artifact is compared with its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.reader import ReaderConfig
from pipeline.data.dataset import Dataset
from pipeline.data.read.reader import ShardReader
from pipeline.data.targets import Target
from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.kept_rows import KeptRows, RowMask
from pipeline.serving.artifact.served_tasks import ServedTask, scores_of
from pipeline.serving.artifact.task_quality import LabelledRows
from pipeline.serving.artifact.trained_model import TrainedModel
from pipeline.serving.scoring.lookup import ServedFeature

BATCH_ROWS = 2048


@dataclass(frozen=True)
class SampleBatch:
    """dense [batch, num_dense] float32, values and offsets as a KeyedJaggedTensor has them, labels [batch, targets];
    `real` [batch] bool: neither padding nor quarantined; `sample_weights` [batch, targets] float32, 0 where a label does not
    count; `weights` of values, where ids have some. `compose` makes of pooled parts what the layers take."""

    dense: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    labels: torch.Tensor
    real: torch.Tensor
    sample_weights: torch.Tensor
    compose: Callable[[torch.Tensor], torch.Tensor] = lambda pooled: pooled
    weights: torch.Tensor | None = None

    @property
    def ids(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As a TableLookup takes them."""
        return self.values, self.offsets, self.weights

    def rows(self, pooled: Callable[[SampleBatch], torch.Tensor]) -> torch.Tensor:
        """[batch, sum of dims] for the layers; a model without tables looks nothing up."""
        if len(self.offsets) == 1:
            return torch.empty(len(self.labels), 0)
        return self.compose(pooled(self))


@dataclass(frozen=True)
class Sample:
    """The first rows of a split, in the order of its files, with their labels of `targets`."""

    split: str
    batches: list[SampleBatch]
    targets: list[Target]

    @property
    def labels(self) -> LabelledRows:
        return labelled_rows(self.batches, self.targets)

    @property
    def num_rows(self) -> int:
        """Padding included."""
        return sum(len(batch.labels) for batch in self.batches)

    def score(
        self,
        program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        pooled: Callable[[SampleBatch], torch.Tensor],
        advance: Callable[[float], None] = lambda rows: None,
    ) -> NDArray[np.float64]:
        """The scores of its real rows [n, targets], float64 of the program's float32 outputs, as the metrics take them.

        `advance` is called with the rows of each batch.
        """
        outputs = []
        with torch.no_grad():
            for batch in self.batches:
                outputs.append(program(batch.dense, batch.rows(pooled))[batch.real])
                advance(len(batch.labels))
        return scores_of_targets(torch.cat(outputs), self.targets)


def labelled_rows(batches: Iterable[SampleBatch], targets: Sequence[Target]) -> LabelledRows:
    """Of the real rows."""
    labels = torch.cat([batch.labels[batch.real] for batch in batches]).double().numpy()
    weights = torch.cat([batch.sample_weights[batch.real] for batch in batches]).double().numpy()
    return LabelledRows(list(targets), labels, weights)


def scores_of_targets(outputs: torch.Tensor, targets: Sequence[Target]) -> NDArray[np.float64]:
    """A program's outputs [n] or [n, sum of widths] -> [n, targets]"""
    tasks = [ServedTask(target.name, target.kind, target.width) for target in targets]
    return scores_of(tasks, outputs.reshape(len(outputs), -1).double()).numpy()


def read_sample(
    folder: str,
    dataset: Dataset,
    name: str,
    max_rows: int,
    config: ReaderConfig,
    multi_hot: dict[str, int],
    trained: TrainedModel,
) -> Sample:
    """Of the features that `trained` reads, and its labels."""
    keys, composed, targets = trained.keys, trained.composed, trained.targets
    in_order = replace(config, shuffle="none", num_streams=1, decode_threads=1)
    rows = min(BATCH_ROWS, max_rows)
    reader = ShardReader(
        folder, dataset, name, global_batch_size=rows, rank=0, world_size=1, config=in_order, seed=0,
        multi_hot=multi_hot, drop_last=False, targets=targets,
    )  # fmt: skip
    batches, left, source = [], max_rows, reader.batches(epoch=0)
    try:
        for batch in source:
            real = batch.is_present & (torch.arange(batch.batch_size) < left)
            labels, weights = (part.view(batch.batch_size, -1) for part in (batch.labels, batch.sample_weights))
            labelled = labels, real, weights
            sparse = batch.sparse_features
            if sparse.keys() != keys:
                sparse = sparse.permute([sparse.keys().index(key) for key in keys])
            if composed is None:
                ids = sparse.values(), sparse.offsets().long()
                own = sparse.weights_or_none()
                batches.append(SampleBatch(batch.dense_features, *ids, *labelled, weights=own))
            else:
                split = composed.split(sparse)
                compose = partial(composed.compose, split=split)
                values, offsets, own = composed.ids_looked_up(split)
                batches.append(SampleBatch(batch.dense_features, values, offsets, *labelled, compose, own))
            left -= batch.batch_size
            if left <= 0:
                break
    finally:
        source.close()
    return Sample(name, batches, targets)


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
