"""Measure how well scores are calibrated, before and after a calibration.

ECE is the metric `ece`, in 100 buckets of the predicted probability. Its interval is 1.96 standard
deviations of a bootstrap over blocks of rows. `chance` is the ECE that perfectly calibrated scores
have on so many rows, because the labels of a bucket differ from its probabilities by chance.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import expit

from pipeline.data.quality import auc, log_losses, normalized_entropy
from pipeline.extras.score_calibration.curves import Floats
from pipeline.models.metrics.ece import NUM_BUCKETS, ExpectedCalibrationError

NUM_BLOCKS, NUM_SAMPLES = 200, 1000


def measured(logits: Floats, labels: Floats, weights: Floats) -> dict[str, Any]:
    """Return the ECE with its interval, NE and AUC of rows [n]."""
    counted = weights > 0
    logits, labels, weights = logits[counted], labels[counted], weights[counted]
    scores, metric = expit(logits), ExpectedCalibrationError()
    rows = np.array_split(np.arange(len(logits)), min(NUM_BLOCKS, max(1, len(logits))))
    blocks = np.stack([metric.sums(scores[part], labels[part], weights[part]) for part in rows])
    value = metric.value(blocks.sum(0))
    shares = np.random.default_rng(0).multinomial(len(rows), np.full(len(rows), 1 / len(rows)), NUM_SAMPLES)
    width = 1.96 * float(np.std([metric.value(sums) for sums in shares @ blocks]))
    return {
        "ece": value,
        "ece_low": max(0.0, value - width),
        "ece_high": value + width,
        "chance": _chance(scores, weights),
        "ne": normalized_entropy(log_losses(logits, labels), labels, weights),
        "auc": auc(logits, labels, weights),
    }


def _chance(scores: Floats, weights: Floats) -> float:
    """Return the mean ECE of labels that are drawn by the scores: E|normal| is its deviation times sqrt(2 / pi)."""
    buckets = np.minimum((scores * NUM_BUCKETS).astype(np.int64), NUM_BUCKETS - 1)
    variances = np.bincount(buckets, weights**2 * scores * (1 - scores), minlength=NUM_BUCKETS)
    return float(math.sqrt(2 / math.pi) * np.sqrt(variances).sum() / weights.sum())


def describe_calibration(found: dict[str, Any]) -> list[str]:
    """Return the lines that `export` prints for a certificate's entry `calibration`."""
    by = f" by {found['by']}" if found["by"] else ""
    lines = [f"calibration {found['kind']}{by}, fitted on {found['rows']:,} validation rows"]
    for label, about in found["labels"].items():
        for split, (before, after) in about["splits"].items():
            intervals = " -> ".join(
                f"{each['ece']:.5f} ({each['ece_low']:.5f} to {each['ece_high']:.5f})" for each in (before, after)
            )
            curves = f", {about['values']} values have their own curve" if found["by"] else ""
            lines.append(
                f"  {split:<12}{label} ECE {intervals}, {after['chance']:.5f} by chance; NE {before['ne']:.5f} -> {after['ne']:.5f}, "
                f"AUC {after['auc'] - before['auc']:+.6f}{curves}"
            )
    return lines
