"""Measure an artifact for its card: each binary label by NE, AUC and calibration with their 95 %
intervals, on all rows and on the rows of each value of card.slices.

The rows and the scores are those of the certificate. The scores are not calibrated; the calibration
has its own measurements in the certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.extras.model_card.card import Metric
from pipeline.extras.runs.slices import ALL, SliceOfRows, Slicer
from pipeline.runtime.errors import ServingError
from pipeline.serving.artifact.plan import ExportPlan
from pipeline.serving.artifact.reference import Sample, first_batches
from pipeline.serving.artifact.task_quality import qualities
from pipeline.serving.artifact.trained_step import TrainedStep

WITHIN = 1.96  # standard errors: 95 %
Floats = NDArray[np.float64]


def measure_artifact(
    job: ExportJob, plan: ExportPlan, samples: Mapping[str, Sample], outputs: Mapping[str, Floats], writer: object
) -> dict[str, Any]:
    """Return the entry `measures` of the certificate: split -> metrics. `outputs`: the artifact's
    outputs [rows, columns] for each split's sample.

    Raises ConfigError or ServingError if card.slices names something that cannot be a slice.
    """
    step = plan.step
    if job.card.slices and not any(target.kind == "binary" for target in step.targets):
        raise ServingError(f"card.slices={job.card.slices} needs a binary label, and this model has none: leave it out")
    slicer = Slicer(job.card.slices, step.data_path, step.dataset, step.dataset.sparse_feature_names)
    found = {
        split: _measured(step, split, sample, outputs[split], slicer, job.parity.max_rows if job.card.slices else 0)
        for split, sample in samples.items()
    }
    return {"measures": {split: [vars(each) for each in metrics] for split, metrics in found.items()}}


def _measured(
    step: TrainedStep, split: str, sample: Sample, outputs: Floats, slicer: Slicer, max_rows: int
) -> list[Metric]:
    rows, column, clicks, found = sample.labels, 0, {}, []
    of_targets = qualities(rows, sample.scores(outputs))
    for number, (target, quality) in enumerate(zip(step.targets, of_targets, strict=True)):
        weights = rows.weights[:, number]
        if target.kind == "binary":
            clicks[target.name] = np.stack([outputs[:, column], rows.labels[:, number], weights], axis=1)
        else:
            counted = int(np.count_nonzero(weights))
            found.append(Metric("mse/variance", split, target.name, None, counted, quality.ne, None, None))
        column += target.width
    if clicks:
        values = _values(step, split, slicer, max_rows) if max_rows else np.empty((len(outputs), 0))
        found += [metric for each in slicer.measured(values, clicks) for metric in _of_slice(each, split)]
    return found


def _values(step: TrainedStep, split: str, slicer: Slicer, max_rows: int) -> Floats:
    """Return the values of the slices' features for the rows of the sample."""
    found, left = [], max_rows
    for batch in first_batches(step, split, max_rows):
        real = batch.is_present & (torch.arange(batch.batch_size) < left)
        left -= batch.batch_size
        found.append(slicer.values_of(batch)[real])
    return torch.cat(found).numpy()


def _of_slice(part: SliceOfRows, split: str) -> list[Metric]:
    where = None if part.by == ALL else f"{part.by}={part.value}"
    estimates = {"ne": part.ne, "auc": part.auc, "calibration": part.calibration}
    return [
        Metric(name, split, part.label, where, part.rows, value, *_interval(value, error))
        for name, (value, error) in estimates.items()
    ]


def _interval(value: float | None, error: float | None) -> tuple[float | None, float | None]:
    return (None, None) if value is None or error is None else (value - WITHIN * error, value + WITHIN * error)
