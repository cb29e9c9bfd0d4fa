"""Check the results of a training run for values that are probably unintended, and suggest what to
check."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pipeline.config.training import TrainerConfig
from pipeline.runtime.storage import storage

FEW_STEPS = 100
OVERFITTED = 1.1  # ratio of validation NE to training NE
UNCALIBRATED = 0.1  # distance of calibration from 1
RISEN = 1.1  # ratio of training NE at the end to its minimum
RANKS_NOTHING = 0.005  # distance of AUC from 0.5


def undefined(metrics: Mapping[str, float]) -> str:
    """Say why NE and AUC are NaN, for each label; "" if they are defined.

    They need labels of both kinds.
    """
    reasons = []
    for name, rate in metrics.items():
        label, slash, measure = name.rpartition("/")
        if measure == "label_rate" and rate in (0.0, 1.0):
            whose, rows = f"{label}: " if label else "", metrics.get(f"{label}{slash}num_samples", 0)
            reasons.append(f"{whose}all {rows:,} labels are {rate:.0f}: NE and AUC need both kinds")
    return "; ".join(reasons)


def result_warnings(
    config: TrainerConfig, step: int, steps_per_epoch: int, metrics: Mapping[str, float], metrics_path: str
) -> list[str]:
    """Return a line for each finding at `step`.

    `metrics` are of the validation split; empty without one.
    """
    found = []
    if step < FEW_STEPS:
        found.append(
            f"few steps: {step} of {config.global_batch_size:,} rows, {steps_per_epoch} an epoch; a smaller "
            "trainer.global_batch_size or more trainer.epochs train further"
        )
    elif step < steps_per_epoch:
        found.append(f"under one epoch: {step:,} of {steps_per_epoch:,} steps")
    if reason := undefined(metrics):
        return [*found, f"validation: {reason}; choose another data.split"]
    train = _train_ne(metrics_path)
    ne, auc = metrics.get("ne", math.nan), metrics.get("auc", math.nan)
    if ne >= 1.0:
        found.append(
            f"validation NE {ne:.4f} is not below 1, the NE of predicting the label rate for every row: train longer, or lower "
            "optimizer.sparse.lr and optimizer.dense.lr"
        )
    elif train and ne > OVERFITTED * train[-1]:
        found.append(
            f"overfitting: NE {train[-1]:.4f} in training, {ne:.4f} on validation; fewer trainer.epochs, early_stop=auc, "
            "optimizer.sparse.weight_decay, tables.default.l2 or model.dropout"
        )
    if train and train[-1] > RISEN * min(train):
        found.append(
            f"training NE rose from {min(train):.4f} to {train[-1]:.4f}: lower optimizer.sparse.lr or optimizer.dense.lr, or warm "
            "up (schedule.*.warmup_steps)"
        )
    if abs(metrics.get("calibration", 1.0) - 1.0) > UNCALIBRATED:
        found.append(
            f"calibration {metrics['calibration']:.3f}: predicted clicks over clicks should be near 1; train longer, or look for "
            "a validation split of another time or kind"
        )
    if abs(auc - 0.5) < RANKS_NOTHING:
        found.append(
            f"AUC {auc:.4f}: the predictions rank nothing, or are constant; are the features the right columns?"
        )
    return found


def _train_ne(path: str) -> list[float]:
    """Return the NE of the training rows at each log line, in order; empty if the model has no NE."""
    lines = storage.read_text(path).splitlines() if storage.is_file(path) else []
    values: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [float(each["ne"]) for each in values if each.get("kind") == "train" and each.get("ne") is not None]
