"""Score rows of the data set with the trained model, to judge an export before its tables are written.

Only the rows that the samples look up are read, and stored in files. Each row is quantized
independently of other rows, so a small table gives the scores of the whole table.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.data.read.batch import Batch
from pipeline.data.read.reader import ShardReader
from pipeline.data.targets import Target
from pipeline.runtime.errors import ServingError
from pipeline.runtime.logs import get_logger, progress
from pipeline.serving.artifact.quantize import KeptRows, RowMask, write_rows
from pipeline.serving.artifact.task_quality import (
    LabelledRows,
    Parity,
    Quality,
    ServedTask,
    compare,
    measures,
    qualities,
    scores_of,
)
from pipeline.serving.artifact.trained_step import TrainedStep, block_rows
from pipeline.serving.scoring.lookup import MappedLookup, ServedTable

BATCH_ROWS = 2048
SPLIT = "validation"
Scores = NDArray[np.float64]
Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
logger = get_logger("pipeline.export")


@dataclass(frozen=True)
class SampleBatch:
    """Rows of the data set in the form that layers and tables need.

    dense: [batch, num_dense] float32. values, offsets, weights: the arguments of
    TableLookup.pooled. labels, sample_weights: [batch, targets]; the weight is 0 if a label does
    not count. real: [batch] bool, False for padding and for rows in quarantine. compose: computes
    the input of the layers from the pooled rows of compressed tables.
    """

    dense: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    labels: torch.Tensor
    sample_weights: torch.Tensor
    real: torch.Tensor
    compose: Callable[[torch.Tensor], torch.Tensor]

    @property
    def ids(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the arguments of TableLookup.pooled."""
        return self.values, self.offsets, self.weights

    def rows(self, pooled: Callable[[SampleBatch], torch.Tensor]) -> torch.Tensor:
        """Return the pooled rows [batch, sum of dims]. A model without tables has no lookups."""
        if len(self.offsets) == 1:
            return torch.empty(len(self.labels), 0)
        return self.compose(pooled(self))


@dataclass(frozen=True)
class Sample:
    """The first rows of a split, in the order of its files."""

    batches: list[SampleBatch]
    targets: list[Target]

    @property
    def labels(self) -> LabelledRows:
        """Return the labels of the real rows, and their weights."""
        labels = torch.cat([batch.labels[batch.real] for batch in self.batches]).double().numpy()
        weights = torch.cat([batch.sample_weights[batch.real] for batch in self.batches]).double().numpy()
        return LabelledRows(self.targets, labels, weights)

    @property
    def num_rows(self) -> int:
        """Return the number of rows, including padding."""
        return sum(len(batch.labels) for batch in self.batches)

    def outputs(
        self,
        program: Program,
        pooled: Callable[[SampleBatch], torch.Tensor],
        advance: Callable[[float], object] = lambda rows: None,
    ) -> Scores:
        """Return the program's outputs for the real rows, [n, sum of the targets' widths].

        advance: called with the number of rows of each batch.
        """
        outputs = []
        with torch.no_grad():
            for batch in self.batches:
                outputs.append(program(batch.dense, batch.rows(pooled))[batch.real])
                advance(len(batch.labels))
        found = torch.cat(outputs)
        return found.reshape(len(found), -1).double().numpy()

    def scores(self, outputs: Scores) -> Scores:
        """Return the scores [n, targets] of outputs [n, sum of the targets' widths]."""
        tasks = [ServedTask(target.name, target.kind, target.width) for target in self.targets]
        return scores_of(tasks, torch.from_numpy(outputs)).numpy()

    def score(
        self,
        program: Program,
        pooled: Callable[[SampleBatch], torch.Tensor],
        advance: Callable[[float], object] = lambda rows: None,
    ) -> Scores:
        """Return the scores of the real rows [n, targets], float64 of the program's float32 outputs."""
        return self.scores(self.outputs(program, pooled, advance))


def _as_is(pooled: torch.Tensor) -> torch.Tensor:
    return pooled


def first_batches(step: TrainedStep, split: str, max_rows: int) -> Iterator[Batch]:
    """Yield the first rows of a split of the data set, in the order of its files."""
    data = step.job.data
    reader = ShardReader(
        step.data_path,
        step.dataset,
        split,
        global_batch_size=min(BATCH_ROWS, max_rows),
        rank=0,
        world_size=1,
        config=replace(data.reader, shuffle="none", num_streams=1, decode_threads=1),
        seed=0,
        multi_hot=data.synthetic_multi_hot,
        drop_last=False,
        targets=step.targets,
    )
    batches, left = reader.batches(epoch=0), max_rows
    try:
        for batch in batches:
            yield batch
            left -= batch.batch_size
            if left <= 0:
                return
    finally:
        batches.close()


def read_samples(job: ExportJob, step: TrainedStep) -> dict[str, Sample]:
    """Read the rows of job.parity. Raises ServingError if the data set has no validation rows."""
    splits = [name for name in job.parity.splits if step.dataset.splits[name].num_rows]
    if SPLIT not in splits:
        raise ServingError(
            f"data set {step.dataset.name!r} has no validation rows to certify an artifact by: prepare it "
            "again with data.split.validation_fraction above 0"
        )
    samples = {}
    with progress("reading rows to compare scores on", len(splits)) as bar:
        for split in splits:
            samples[split] = _read_sample(step, split, job.parity.max_rows)
            bar.advance(1)
    return samples


def _read_sample(step: TrainedStep, split: str, max_rows: int) -> Sample:
    batches, left = [], max_rows
    for batch in first_batches(step, split, max_rows):
        labels, weights = (part.view(batch.batch_size, -1) for part in (batch.labels, batch.sample_weights))
        real = batch.is_present & (torch.arange(batch.batch_size) < left)
        sparse, compose = batch.sparse_features, _as_is
        if sparse.keys() != step.keys:
            sparse = sparse.permute([sparse.keys().index(key) for key in step.keys])
        if step.composed is None:
            ids = sparse.values(), sparse.offsets().long(), sparse.weights_or_none()
        else:
            split_ids = step.composed.split(sparse)
            compose = partial(step.composed.compose, split=split_ids)
            ids = step.composed.ids_looked_up(split_ids)
        batches.append(SampleBatch(batch.dense_features, *ids, labels, weights, real, compose))
        left -= batch.batch_size
    return Sample(batches, step.targets)


@dataclass(frozen=True)
class Reference:
    """The trained model on its samples: scores [rows, targets] and their quality by split.

    lookup: the fp32 rows that the samples look up. scratch: a folder for tables at other precisions.
    """

    trained: TrainedStep
    samples: dict[str, Sample]
    lookup: MappedLookup
    scores: dict[str, Scores]
    qualities: dict[str, list[Quality]]
    scratch: str
    measured: dict[tuple[str, ...], Parity] = field(default_factory=dict)  # by split and precisions

    def compare(self, split: str, scores: Scores) -> Parity:
        return compare(self.scores[split], scores, self.samples[split].labels, self.qualities[split])

    def of_batches(self, split: str, batches: slice) -> Reference:
        """Return a reference on some batches of one split, with nothing measured yet."""
        sample = self.samples[split]
        few = replace(sample, batches=sample.batches[batches])
        ends = np.cumsum([int(batch.real.sum()) for batch in sample.batches])
        scores = np.concatenate(np.split(self.scores[split], ends[:-1])[batches])
        measured = {split: qualities(few.labels, scores)}
        return replace(self, samples={split: few}, scores={split: scores}, qualities=measured, measured={})

    def parity_of(self, split: str, precisions: list[str]) -> Parity:
        """Measure the trained layers over tables of these precisions. Each mix is measured once."""
        key = (split, *precisions)
        if key not in self.measured:
            self.measured[key] = self.compare(split, self.scores_of(split, precisions))
        return self.measured[key]

    def scores_of(self, split: str, precisions: list[str]) -> Scores:
        """Score the trained layers over tables of these precisions."""
        if set(precisions) == {"fp32"}:
            return self.scores[split]
        with self._quantized(precisions) as lookup:
            return self.samples[split].score(self.trained.program(), lambda batch: lookup.pooled(*batch.ids))

    def parity_of_pruned(self, split: str, kept: list[KeptRows | None]) -> Parity:
        """Measure the trained layers over fp32 rows, with row 0 instead of rows that are not kept."""
        return self._parity(split, lambda batch: self.lookup.pooled(self._pruned(batch, kept), *batch.ids[1:]))

    def _parity(self, split: str, pooled: Callable[[SampleBatch], torch.Tensor]) -> Parity:
        return self.compare(split, self.samples[split].score(self.trained.program(), pooled))

    def _pruned(self, batch: SampleBatch, kept: list[KeptRows | None]) -> torch.Tensor:
        values = batch.values.clone()
        ends = batch.offsets[:: len(batch.labels)].tolist()
        for feature, begin, end in zip(self.trained.features, ends, ends[1:], strict=False):
            if (rows := kept[feature.table]) is not None:
                ids = values[begin:end]
                ids *= torch.from_numpy(rows.contains(ids.numpy()))
        return values

    @contextmanager
    def _quantized(self, precisions: list[str]) -> Iterator[MappedLookup]:
        """Yield a lookup of the rows at these precisions. Its files are removed at the end."""
        folder = os.path.join(self.scratch, "quantized")
        os.mkdir(folder)
        tables = []
        for number, (table, precision) in enumerate(zip(self.lookup.tables, precisions, strict=True)):
            if precision != "fp32":
                path = os.path.join(folder, f"{number:05d}.rows")
                write_rows(path, _file_rows(table.path, table.stored_rows, table.dim), precision)
                table = replace(table, path=path, precision=precision)
            tables.append(table)
        try:
            yield MappedLookup(tables, self.trained.features)
        finally:
            shutil.rmtree(folder)


def make_reference(step: TrainedStep, samples: dict[str, Sample], scratch: str) -> Reference:
    """Score the samples with the trained model, and log its quality."""
    lookup = fp32_lookup(step, samples, scratch)
    program = step.program()
    with progress("scoring by the trained model", sum(sample.num_rows for sample in samples.values())) as bar:
        scores = {
            split: sample.score(program, lambda batch: lookup.pooled(*batch.ids), bar.advance)
            for split, sample in samples.items()
        }
    measured = {split: qualities(sample.labels, scores[split]) for split, sample in samples.items()}
    for split, found in measured.items():
        for target, each in zip(step.targets, found, strict=True):
            name = f", {target.name}" if len(found) > 1 else ""
            numbers = [f"{title} {getattr(each, key):.5f}" for key, title in measures(each.ne, each.auc).items()]
            quality = ", ".join(numbers) or "all labels are of one kind, so NE is undefined,"
            logger.info("model      %s%s: %s on %s rows", split, name, quality, f"{len(scores[split]):,}")
    return Reference(step, samples, lookup, scores, measured, scratch)


def fp32_lookup(step: TrainedStep, samples: dict[str, Sample], scratch: str) -> MappedLookup:
    """Write the trained rows that the samples look up to files in `scratch`."""
    used = _used_rows(step, list(samples.values()))
    tables = []
    for number, (table, stored, rows) in enumerate(zip(step.tables, step.stored, used, strict=True)):
        path = os.path.join(scratch, f"{number:05d}.fp32")
        write_rows(path, step.rows(stored, rows), "fp32")
        tables.append(
            ServedTable(table.name, stored.rows, rows.num_kept, stored.dim, "fp32", table.pooling, path, rows)
        )
    return MappedLookup(tables, step.features)


def _file_rows(path: str, num_rows: int, dim: int) -> Iterator[torch.Tensor]:
    """Yield the rows of a file of fp32 rows, [n, dim] float32."""
    rows_at_once = block_rows(4 * dim)
    with open(path, "rb") as file:
        for first in range(0, num_rows, rows_at_once):
            count = min(rows_at_once, num_rows - first)
            yield torch.from_numpy(np.fromfile(file, np.float32, count * dim).reshape(count, dim))


def _used_rows(step: TrainedStep, samples: Sequence[Sample]) -> list[KeptRows]:
    """Return for each table the rows that the samples look up. Raises ServingError if an id is outside its table."""
    masks = [RowMask(stored.rows) for stored in step.stored]
    for batch in (batch for sample in samples for batch in sample.batches):
        ends = batch.offsets[:: len(batch.labels)].tolist()
        for feature, begin, end in zip(step.features, ends, ends[1:], strict=False):
            ids, num_rows = batch.values[begin:end].numpy(), step.stored[feature.table].rows
            if len(ids) and (ids.min() < 0 or ids.max() >= num_rows):
                raise ServingError(
                    f"feature {feature.name!r} has ids up to {ids.max()}, its table has {num_rows} rows: "
                    "these are not the data that the run was trained on"
                )
            masks[feature.table].add(ids)
    return [mask.finish() for mask in masks]
