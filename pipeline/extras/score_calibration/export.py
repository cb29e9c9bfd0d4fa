"""Fit the calibration of an artifact on the validation rows, at an export and at each delta.

The certificate measures the validation rows by curves that were fitted without them: even rows are
scored by curves of odd rows, and odd rows by curves of even rows. The artifact has the curves of
all validation rows. Other splits are measured by these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.config.jobs.evaluate import ExportJob
from pipeline.config.serving import CalibrationConfig
from pipeline.data.quality import auc
from pipeline.extras.score_calibration.calibration import Calibration, Ids, fit_columns, ids_of_rows, names_of
from pipeline.extras.score_calibration.certificate import measured
from pipeline.extras.score_calibration.curves import Curves, Floats
from pipeline.runtime.errors import ServingError, did_you_mean
from pipeline.runtime.logs import get_logger
from pipeline.serving.artifact.manifest import CALIBRATION_FILE
from pipeline.serving.artifact.plan import ExportPlan
from pipeline.serving.artifact.reference import SPLIT, Sample, first_batches
from pipeline.serving.artifact.task_quality import LabelledRows
from pipeline.serving.artifact.trained_step import TrainedStep
from pipeline.serving.artifact.writer import ArtifactWriter
from pipeline.serving.scoring.predictor import Predictor

logger = get_logger("pipeline.export")


def calibrate_artifact(
    job: ExportJob,
    plan: ExportPlan,
    samples: Mapping[str, Sample],
    outputs: Mapping[str, Floats],
    writer: ArtifactWriter,
) -> dict[str, Any]:
    """Write calibration.json. Return the entry `calibration` of the certificate. `outputs`: the
    artifact's outputs [rows, columns] for each split's sample.

    Raises ServingError: no label is binary, the column is not a feature with one value in each row, or no
    curve can be fitted.
    """
    config, step = job.calibration, plan.step
    _check(config, plan)
    ids = {split: _column_ids(config, plan.step, split, job.parity.max_rows) for split in samples}
    if config.by is not None and (kept := plan.kept_of.get(config.by)) is not None:
        for each in ids.values():  # a value without a stored row is unknown to the artifact
            assert each is not None
            each *= kept.contains(each)
    rows = {split: sample.labels for split, sample in samples.items()}
    columns = _fit(config, step, outputs[SPLIT], rows[SPLIT], ids[SPLIT])
    writer.add_bytes(CALIBRATION_FILE, Calibration(config.kind, config.by, columns, plan.schema).to_bytes())
    labels = {
        target.name: _certified(config, rows, outputs, ids, (number, column), curves)
        for number, (target, column) in enumerate(zip(step.targets, _columns_of(step), strict=True))
        if (curves := columns[column]) is not None
    }
    return {"calibration": {"kind": config.kind, "by": config.by, "rows": len(outputs[SPLIT]), "labels": labels}}


def refit_calibration(predictor: Predictor, trained: TrainedStep) -> Calibration:
    """Fit the calibration again, on the scores that the predictor gives now, with the settings and
    the rows of its artifact. Raises ServingError if no curve can be fitted."""
    settings = predictor.manifest.settings
    config, max_rows = CalibrationConfig(**settings["calibration"]), int(settings["parity"]["max_rows"])
    parts: dict[str, list[Floats]] = {"outputs": [], "labels": [], "weights": []}
    left = max_rows
    for batch in first_batches(trained, SPLIT, max_rows):
        real = batch.is_present.numpy() & (np.arange(batch.batch_size) < left)
        left -= batch.batch_size
        found = predictor.outputs(batch.dense_features, batch.sparse_features), batch.labels, batch.sample_weights
        for part, tensor in zip(parts.values(), found, strict=True):
            part.append(tensor.reshape(batch.batch_size, -1).double().numpy()[real])
    outputs, labels, weights = map(np.concatenate, parts.values())
    rows = LabelledRows(trained.targets, labels, weights)
    ids = _column_ids(config, trained, SPLIT, max_rows)
    columns = _fit(config, trained, outputs, rows, ids)
    return Calibration(config.kind, config.by, columns, predictor.manifest.schema)


def _check(config: CalibrationConfig, plan: ExportPlan) -> None:
    if not any(target.kind == "binary" for target in plan.step.targets):
        raise ServingError(
            f"calibration.kind={config.kind} calibrates binary labels, and this model has none: leave it out"
        )
    if config.by is not None and config.by not in (names := names_of(plan.schema)):
        raise ServingError(
            f"calibration.by={config.by} is not a categorical feature with one value in each row{did_you_mean(config.by, names)}; "
            f"there are {', '.join(names[:10]) or 'none'}"
        )


def _columns_of(step: TrainedStep) -> list[int]:
    """Return the first column of each target in the layers' outputs."""
    return [sum(target.width for target in step.targets[:number]) for number in range(len(step.targets))]


def _column_ids(config: CalibrationConfig, step: TrainedStep, split: str, max_rows: int) -> Ids | None:
    """Return the ids of the column for the first rows of a split; None without a column."""
    if config.by is None:
        return None
    found, left = [], max_rows
    for batch in first_batches(step, split, max_rows):
        real = batch.is_present.numpy() & (np.arange(batch.batch_size) < left)
        left -= batch.batch_size
        sparse = batch.sparse_features
        keys = sparse.keys()
        found.append(ids_of_rows(sparse.values(), sparse.offsets().long(), keys.index(config.by), len(keys))[real])
    return np.concatenate(found)


def _fit(
    config: CalibrationConfig, step: TrainedStep, outputs: Floats, rows: LabelledRows, ids: Ids | None
) -> list[Curves | None]:
    """Return the curves of each column of the outputs. Raises ServingError if a label has none."""
    columns: list[Curves | None] = [None] * outputs.shape[1]
    for number, (target, column) in enumerate(zip(step.targets, _columns_of(step), strict=True)):
        if target.kind != "binary":
            continue
        own = outputs[:, column], rows.labels[:, number], rows.weights[:, number]
        columns[column] = fit_columns(config, *own, ids)
        if columns[column] is None:
            raise ServingError(
                f"calibration.kind={config.kind} finds no curve for label {target.name!r} on {len(outputs):,} validation rows: their "
                "labels are of one kind, or higher scores have fewer positive labels; train longer, or leave out the calibration"
            )
    return columns


def _certified(
    config: CalibrationConfig,
    rows: Mapping[str, LabelledRows],
    outputs: Mapping[str, Floats],
    ids: Mapping[str, Ids | None],
    place: tuple[int, int],
    curves: Curves,
) -> dict[str, Any]:
    """Return the certificate of a label. `place`: its number, and its column of the outputs."""
    number, column = place
    splits = {}
    for split, of_split in rows.items():
        logits, labels, weights = outputs[split][:, column], of_split.labels[:, number], of_split.weights[:, number]
        own = ids[split]
        if split != SPLIT:
            after = curves(logits, own)
        else:
            after, is_odd = logits.copy(), np.arange(len(logits)) % 2 == 1
            for half in (is_odd, ~is_odd):
                other = fit_columns(
                    config, logits[~half], labels[~half], weights[~half], None if own is None else own[~half]
                )
                after[half] = (other or curves)(logits[half], None if own is None else own[half])
        before, now = measured(logits, labels, weights), measured(after, labels, weights)
        if not curves.by_id:  # one increasing curve, and not the two of the halves
            now["auc"] = auc(curves(logits)[weights > 0], labels[weights > 0], weights[weights > 0])
        splits[split] = [before, now]
        if split == SPLIT and now["ne"] > before["ne"]:
            logger.warning(
                "calibration.kind=%s raises NE of validation rows that did not fit it from %.5f to %.5f: fit it on more rows "
                "(parity.max_rows), raise calibration.min_rows, or choose platt",
                config.kind, before["ne"], now["ne"],
            )  # fmt: skip
        logger.info(
            "calibration %s: ECE %.5f -> %.5f (%.5f by chance)", split, before["ece"], now["ece"], now["chance"]
        )
    return {"values": len(curves.by_id), "splits": splits}
