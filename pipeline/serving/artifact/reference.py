"""Score samples with the trained model at any precision, to judge an export before its tables are written.

Only these rows of the checkpoint are read, and they lie in files: memory stays what blocks and samples take. A row is
quantized by itself, so that a small table's scores are those of the whole table.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.runtime.logs import progress
from pipeline.serving.artifact.certification_sample import Sample, SampleBatch, used_rows
from pipeline.serving.artifact.kept_rows import KeptRows
from pipeline.serving.artifact.table_files import checkpoint_rows, file_rows, write_rows
from pipeline.serving.artifact.task_quality import Parity, Quality, compare, qualities
from pipeline.serving.artifact.trained_model import TrainedModel
from pipeline.serving.scoring.lookup import MappedLookup, ServedTable

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Reference:
    """The trained model on its samples: scores [rows, targets] and their quality by split, and the fp32 rows that they took."""

    trained: TrainedModel
    samples: dict[str, Sample]
    lookup: MappedLookup
    scores: dict[str, Scores]
    qualities: dict[str, list[Quality]]
    scratch: str
    measured: dict[tuple[str, ...], Parity] = field(default_factory=dict)  # by split and precisions

    def compare(self, split: str, scores: Scores) -> Parity:
        return compare(self.scores[split], scores, self.samples[split].labels, self.qualities[split])

    def first_batches(self, split: str, count: int) -> Reference:
        """A reference on the first batches of one split, with nothing measured yet."""
        sample = self.samples[split]
        few = replace(sample, batches=sample.batches[:count])
        scores = self.scores[split][: len(few.labels.labels)]
        measured = {split: qualities(few.labels, scores)}
        return replace(self, samples={split: few}, scores={split: scores}, qualities=measured, measured={})

    def parity_of(self, split: str, precisions: list[str]) -> Parity:
        """Of the trained layers over tables of these precisions, one a table; measured once for each."""
        key = (split, *precisions)
        if key not in self.measured:
            self.measured[key] = self._measure(split, precisions)
        return self.measured[key]

    def _measure(self, split: str, precisions: list[str]) -> Parity:
        if set(precisions) == {"fp32"}:
            return self.compare(split, self.scores[split])  # that is what they are
        with _quantized(self, precisions) as lookup:
            return self._parity(split, lambda batch: lookup.pooled(*batch.ids))

    def parity_of_pruned(self, split: str, kept: list[KeptRows | None]) -> Parity:
        """Of the trained layers and fp32 rows, with row 0 for those that are not kept."""
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


def make_reference(trained: TrainedModel, samples: dict[str, Sample], scratch: str) -> Reference:
    """Reads what the samples look up into `scratch`, and scores them."""
    lookup = fp32_lookup(trained, samples, scratch)
    program = trained.program()
    with progress("scoring by the trained model", sum(sample.num_rows for sample in samples.values())) as bar:
        scores = {
            split: sample.score(program, lambda batch: lookup.pooled(*batch.ids), bar.advance)
            for split, sample in samples.items()
        }
    measured = {split: qualities(sample.labels, scores[split]) for split, sample in samples.items()}
    return Reference(trained, samples, lookup, scores, measured, scratch)


def fp32_lookup(trained: TrainedModel, samples: dict[str, Sample], scratch: str) -> MappedLookup:
    """The rows as they were trained that the samples look up, in files of `scratch`."""
    used = used_rows(samples.values(), trained.features, [stored.rows for stored in trained.stored])
    tables = []
    for number, (table, stored, rows) in enumerate(zip(trained.tables, trained.stored, used, strict=True)):
        path = os.path.join(scratch, f"{number:05d}.fp32")
        _, num_rows = write_rows(path, checkpoint_rows(trained.tensors, stored, rows), "fp32")
        tables.append(ServedTable(table.name, stored.rows, num_rows, stored.dim, "fp32", table.pooling, path, rows))
    return MappedLookup(tables, trained.features)


class _quantized:
    """A lookup of the reference's rows at other precisions; its files are gone at the end."""

    def __init__(self, reference: Reference, precisions: list[str]) -> None:
        self._reference, self._precisions = reference, precisions
        self._folder = os.path.join(reference.scratch, "quantized")

    def __enter__(self) -> MappedLookup:
        os.mkdir(self._folder)
        tables = [
            quantize_table(table, precision, os.path.join(self._folder, f"{number:05d}.rows"))
            for number, (table, precision) in enumerate(
                zip(self._reference.lookup.tables, self._precisions, strict=True)
            )
        ]
        return MappedLookup(tables, self._reference.trained.features)

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)


def quantize_table(table: ServedTable, precision: str, path: str) -> ServedTable:
    """A table of fp32 rows in a file of its own, at another precision."""
    if precision == "fp32":
        return table
    write_rows(path, file_rows(table.path, table.stored_rows, table.dim), precision)
    return ServedTable(table.name, table.rows, table.stored_rows, table.dim, precision, table.pooling, path, table.kept)
