"""Measure what each table's precision costs in NE, all other tables left as they were trained."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

from pipeline.config.serving import PRECISIONS
from pipeline.runtime.logs import progress
from pipeline.serving.artifact.certification_sample import labelled_rows, scores_of_targets
from pipeline.serving.artifact.quantize import fits, row_bytes
from pipeline.serving.artifact.reference import Reference, quantize_table
from pipeline.serving.artifact.search_precisions import smallest_mix
from pipeline.serving.artifact.task_quality import qualities
from pipeline.serving.scoring.lookup import MappedLookup, ServedFeature

ROWS = 16_384  # on which single tables are measured; whole mixes are on the whole sample
SPLIT = "validation"


def find_mix(reference: Reference, fixed: dict[str, str], budget: float) -> list[str]:
    """The smallest precisions, one a table; tables in `fixed` have theirs already. budget: of NE, on validation."""
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
    with progress("finding the smallest mix") as bar:

        def measure(precisions: list[str]) -> float:
            bar.advance(1)
            return reference.parity_of(SPLIT, precisions).ne_delta

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
    """The first batches of the sample with their fp32 rows pooled, of which one table's columns are put in anew."""

    def __init__(self, reference: Reference) -> None:
        self._reference, self._batches, rows = reference, [], 0
        for batch in reference.samples[SPLIT].batches:
            if rows < ROWS:
                self._batches.append((batch, reference.lookup.pooled(batch.values, batch.offsets)))
                rows += len(batch.labels)
        self._labels = labelled_rows([batch for batch, _ in self._batches], reference.trained.targets)
        self._program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = reference.trained.program()

    def ne(self, table: int | None = None, precision: str = "fp32") -> float:
        """Of the trained model, with one table at another precision; of several labels their mean."""
        features = self._reference.trained.features
        positions = [i for i, feature in enumerate(features) if feature.table == table]
        ends = np.cumsum([0, *self._reference.trained.dims])
        path = os.path.join(self._reference.scratch, "one.rows")
        lookups = None
        if table is not None:
            quantized = quantize_table(self._reference.lookup.tables[table], precision, path)
            lookups = [MappedLookup([quantized], [ServedFeature(features[i].name, 0)]) for i in positions]
        logits = []
        for batch, pooled in self._batches:
            size = len(batch.labels)
            given = pooled.clone() if lookups else pooled
            for i, lookup in zip(positions, lookups or [], strict=True):
                offsets = batch.offsets[i * size : (i + 1) * size + 1]
                given[:, ends[i] : ends[i + 1]] = lookup.pooled(
                    batch.values[offsets[0] : offsets[-1]], offsets - offsets[0]
                )
            with torch.no_grad():
                logits.append(self._program(batch.dense, batch.compose(given))[batch.real])
        if table is not None:
            os.remove(path)
        scores = scores_of_targets(torch.cat(logits), self._labels.targets)
        return float(np.nanmean([each.ne for each in qualities(self._labels, scores)]))
