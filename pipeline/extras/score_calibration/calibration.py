"""The calibration of an artifact's scores, and its file calibration.json.

{"kind": "isotonic", "by": "device" or null,
 "labels": [null, {"whole": curve, "by_id": {"3": curve}}]}  in the order of the artifact's tasks; null: not calibrated
curve: {"x": logits of the model, "y": calibrated logits, "slope": of the line beyond the first and the last point}

`by` names a categorical feature. Its values are ids, as in the artifact's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.serving import CalibrationConfig
from pipeline.extras.score_calibration.curves import Curve, Curves, Floats, fit_curve
from pipeline.serving.artifact.manifest import CALIBRATION_FILE, MAX_ROWS, ArtifactError, Manifest
from pipeline.serving.artifact.raw_schema import RawSchema

MAX_POINTS = 1_000_000
Ids = NDArray[np.int64]


def names_of(schema: RawSchema) -> list[str]:
    """Return the features that have one value in each row."""
    return [each.name for each in schema.features if not each.multi_hot and each.bag_size == 1]


def ids_of_rows(values: torch.Tensor, offsets: torch.Tensor, number: int, num_features: int) -> Ids:
    """Return [batch]: the id of feature `number` in each row, 0 for a row without an id. values,
    offsets: as in a KeyedJaggedTensor of `num_features` features."""
    batch = (len(offsets) - 1) // num_features
    bounds = offsets[number * batch : (number + 1) * batch + 1].numpy()
    ids, has_id = np.zeros(batch, np.int64), bounds[1:] > bounds[:-1]
    ids[has_id] = values.numpy()[bounds[:-1][has_id]]
    return ids


class Calibration:
    """Calibrates the outputs of the layers. `columns`: the curves of each column of the outputs;
    None: the column is not calibrated. `place`: number of the feature `by`, and number of features.
    """

    def __init__(self, kind: str, by: str | None, columns: Sequence[Curves | None], schema: RawSchema) -> None:
        self.kind, self.by, self.columns = kind, by, list(columns)
        names = [feature.name for feature in schema.features]
        self._place = None if by is None else (names.index(by), len(names))

    def apply(self, outputs: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return calibrated outputs, float64, in the same shape."""
        ids = None if self._place is None else ids_of_rows(values, offsets, *self._place)
        found = outputs.double().reshape(len(outputs), -1).numpy().copy()
        for number, curves in enumerate(self.columns):
            if curves is not None:
                found[:, number] = curves(found[:, number], ids)
        return torch.from_numpy(found).reshape(outputs.shape)

    def to_bytes(self) -> bytes:
        labels = [
            None if each is None else {"whole": asdict(each.whole), "by_id": {str(id): asdict(one) for id, one in each.by_id.items()}}
            for each in self.columns
        ]  # fmt: skip
        return json.dumps({"kind": self.kind, "by": self.by, "labels": labels}).encode()


class _LabelFile(msgspec.Struct, forbid_unknown_fields=True):
    whole: Curve
    by_id: dict[int, Curve]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    by: str | None
    labels: list[_LabelFile | None]


def open_calibration(content: bytes, manifest: Manifest) -> Calibration:
    """Return the calibration of an artifact. Raises ArtifactError if the content is damaged or does not fit."""
    try:
        found = msgspec.json.decode(content, type=_File)
        problem = _problem(found, manifest)
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        raise ArtifactError(f"{CALIBRATION_FILE} cannot be used ({problem[:200]}); export again")
    columns = [None if each is None else Curves(each.whole, each.by_id) for each in found.labels]
    return Calibration(found.kind, found.by, columns, manifest.schema)


def _problem(found: _File, manifest: Manifest) -> str:
    """Return "" or what is wrong."""
    num_columns = sum(task.width for task in manifest.tasks) if manifest.tasks else 1
    if len(found.labels) != num_columns:
        return f"it has {len(found.labels)} labels, and the layers have {num_columns} outputs"
    if found.by is not None and found.by not in names_of(manifest.schema):
        return f"the artifact has no feature {found.by!r} with one value in each row"
    if any(not 0 <= id < MAX_ROWS for each in found.labels if each is not None for id in each.by_id):
        return "a value has an id that no table has"
    curves = [curve for each in found.labels if each is not None for curve in (each.whole, *each.by_id.values())]
    if sum(len(curve.x) for curve in curves) > MAX_POINTS:
        return f"its curves have more than {MAX_POINTS} points"
    for curve in curves:
        x, y = np.array(curve.x), np.array(curve.y)
        is_finite = np.isfinite([*x, *y, curve.slope]).all() and curve.slope > 0
        if not (len(x) == len(y) > 0 and is_finite and (np.diff(x) > 0).all() and (np.diff(y) > 0).all()):
            return "a curve does not ascend"
    return ""


def fit_columns(
    config: CalibrationConfig, logits: Floats, labels: Floats, weights: Floats, ids: Ids | None
) -> Curves | None:
    """Fit the curves of one label on rows [n]. None if no curve for all rows can be fitted."""
    counted = weights > 0
    logits, labels, weights = logits[counted], labels[counted], weights[counted]
    whole = fit_curve(config.kind, logits, labels, weights) if len(logits) else None
    if whole is None:
        return None
    by_id: dict[int, Curve] = {}
    if ids is not None:
        ids = ids[counted]
        known, counts = np.unique(ids, return_counts=True)
        for each in known[counts >= config.min_rows].tolist():
            rows = ids == each
            if (curve := fit_curve(config.kind, logits[rows], labels[rows], weights[rows])) is not None:
                by_id[each] = curve
    return Curves(whole, by_id)
