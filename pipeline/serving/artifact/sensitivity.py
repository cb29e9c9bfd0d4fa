"""Measure what each table's precision costs in NE, all other tables left as they were trained."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from pipeline.config.serving import PRECISIONS, ParityConfig
from pipeline.runtime.logs import progress
from pipeline.serving.artifact.certificate import excesses
from pipeline.serving.artifact.certification_sample import SampleBatch, labelled_rows, scores_of_targets
from pipeline.serving.artifact.quantize import fits, row_bytes
from pipeline.serving.artifact.reference import Reference, quantize_table
from pipeline.serving.artifact.search_precisions import smallest_mix
from pipeline.serving.artifact.task_quality import qualities
from pipeline.serving.scoring.lookup import MappedLookup, ServedFeature

ROWS = 16_384  # on which single tables are measured; whole mixes are on the whole sample
SPLIT = "validation"
NEAR = 0.75  # of the limits of parity on AUC and single scores
_Changes = list[tuple[slice, torch.Tensor]]  # of a batch: columns of its pooled rows, and what they become


def find_mix(reference: Reference, fixed: dict[str, str], budget: float, limits: ParityConfig) -> list[str]:
    """The smallest precisions, one a table; tables in `fixed` have theirs already. budget: of NE, on validation.

    A mix near one of `limits` on validation is left out: it would be refused when other splits, pruning and layers come on top.
    """
    trained = reference.trained
    sizes = [
        {name: stored.rows * row_bytes(stored.dim, name) for name in PRECISIONS if fits(stored.dim, name)}
        for stored in trained.stored
    ]
    for table, one in zip(trained.tables, sizes, strict=True):
        if chosen := fixed.get(table.name):
            for name in set(one) - {chosen}:
                del one[name]
    losses = table_losses(reference, sizes)
    near = replace(
        limits,
        max_auc_decrease=NEAR * limits.max_auc_decrease,
        max_score_difference=NEAR * limits.max_score_difference,
    )
    with progress("finding the smallest mix") as bar:

        def measure(precisions: list[str]) -> float:
            bar.advance(1)
            parity = reference.parity_of(SPLIT, precisions)
            return math.inf if excesses({SPLIT: parity}, near) else parity.ne_delta

        return smallest_mix(sizes, losses, measure, budget)


def table_losses(reference: Reference, sizes: list[dict[str, int]]) -> list[dict[str, float]]:
    """Of each table: precision -> NE on the first ROWS rows, less that of the trained model."""
    batches = _Pooled(reference)
    start = batches.ne()
    losses: list[dict[str, float]] = []
    with progress("measuring tables", sum(len(one) for one in sizes)) as bar:
        for number, one in enumerate(sizes):
            losses.append({})
            for name in one:
                losses[-1][name] = 0.0 if name == "fp32" else batches.ne(number, name) - start
                bar.advance(1)
    return losses


class _Pooled:
    """The first batches of the sample with their fp32 rows pooled, of which one table's columns are put in anew.

    Of each batch the outputs and their slopes by the pooled rows are kept: another table's rows move an output by slope times
    change, so the layers run once, forward and backward, and not once a table and precision. Of the outputs the loss is exact.
    Where tables are compressed the layers run each time: rows are composed of several tables' there.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference, rows = reference, 0
        self._batches: list[tuple[SampleBatch, torch.Tensor]] = []
        for batch in reference.samples[SPLIT].batches:
            if rows < ROWS:
                self._batches.append((batch, reference.lookup.pooled(*batch.ids)))
                rows += len(batch.labels)
        self._labels = labelled_rows([batch for batch, _ in self._batches], reference.trained.targets)
        self._program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = reference.trained.program()
        self._slopes: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        if reference.trained.composed is None:
            self._slopes = [_outputs_and_slopes(self._program, batch.dense, pooled) for batch, pooled in self._batches]

    def ne(self, table: int | None = None, precision: str = "fp32") -> float:
        """Of the trained model, with one table at another precision; of several labels their mean."""
        changes: Iterable[_Changes] = [[] for _ in self._batches]
        if table is not None:
            changes = self._changes(table, precision)
        outputs = [self._outputs(number, of_batch) for number, of_batch in enumerate(changes)]
        scores = scores_of_targets(torch.cat(outputs), self._labels.targets)
        return float(np.nanmean([each.ne for each in qualities(self._labels, scores)]))

    def _changes(self, table: int, precision: str) -> Iterator[_Changes]:
        """Of each batch the pooled rows of the table's features at that precision, and in which columns they lie."""
        features = self._reference.trained.features
        positions = [i for i, feature in enumerate(features) if feature.table == table]
        ends = np.cumsum([0, *self._reference.trained.dims]).tolist()
        path = os.path.join(self._reference.scratch, "one.rows")
        quantized = quantize_table(self._reference.lookup.tables[table], precision, path)
        lookups = [MappedLookup([quantized], [ServedFeature(features[i].name, 0)]) for i in positions]
        for batch, _ in self._batches:
            size, changed = len(batch.labels), []
            for i, lookup in zip(positions, lookups, strict=True):
                offsets = batch.offsets[i * size : (i + 1) * size + 1]
                span = slice(int(offsets[0]), int(offsets[-1]))
                weights = None if batch.weights is None else batch.weights[span]
                rows = lookup.pooled(batch.values[span], offsets - offsets[0], weights)
                changed.append((slice(ends[i], ends[i + 1]), rows))
            yield changed
        os.remove(path)

    def _outputs(self, number: int, changes: _Changes) -> torch.Tensor:
        """[rows] or [rows, sum of widths] of the batch's real rows."""
        batch, pooled = self._batches[number]
        if self._slopes is None:
            given = pooled.clone()
            for columns, rows in changes:
                given[:, columns] = rows
            with torch.no_grad():
                return self._program(batch.dense, batch.compose(given))[batch.real]
        outputs, slopes = self._slopes[number]
        moved = outputs.float().reshape(len(pooled), -1).clone()
        for columns, rows in changes:
            moved += torch.einsum("obd,bd->bo", slopes[:, :, columns], rows - pooled[:, columns])
        return moved.reshape(outputs.shape)[batch.real]


def _outputs_and_slopes(
    program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dense: torch.Tensor, pooled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The program's outputs, and of each column of them its slopes by `pooled`: [columns, batch, sum of dims].

    A row's outputs depend on its own pooled rows alone, so the slopes of the sum over rows are those of each row.
    """
    with torch.enable_grad():
        leaf = pooled.detach().requires_grad_()
        outputs = program(dense, leaf)
        columns = outputs.reshape(len(pooled), -1).unbind(1)
        slopes = [
            torch.autograd.grad(column.sum(), leaf, retain_graph=True, materialize_grads=True)[0] for column in columns
        ]
    return outputs.detach(), torch.stack(slopes)
