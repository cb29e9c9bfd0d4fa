"""Measure the confidence of a difference between models: a paired bootstrap over rows, and the
variance between seeds.

Chance has two sources, and their variances are added. The first source is the rows of the split:
the same blocks of rows are resampled for all models, so that effects of hard rows cancel (Efron and
Tibshirani 1993). The second source is the seed: runs that differ only in the seed show its effect,
and Student's t accounts for their small number. If both variants have the same seeds, at least
three, their runs are also paired: a seed gives both the same initial weights and order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from pipeline.extras.runs.evaluation_stats import Blocks

NUM_SAMPLES = 1000
SAMPLES_AT_ONCE = 50
MIN_PAIRED = 3  # with two pairs Student's t makes the interval so wide that nothing is significant
MEASURES = ("ne", "logloss", "auc", "calibration")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """A variant's mean metric minus the baseline's.

    half_width: half the width of its confidence interval. seeds_known: the interval accounts for
    other seeds; otherwise it is about these two models on other rows, and not about their configs.
    """

    value: float
    half_width: float
    confidence: float
    seeds_known: bool

    @property
    def is_significant(self) -> bool:
        """Return True if 0 is outside the interval."""
        return abs(self.value) > self.half_width

    @property
    def is_called(self) -> bool:
        """Return True if the variants differ, and not only these two models of them."""
        return self.is_significant and self.seeds_known


def resampled_measures(
    runs: Mapping[str, Blocks], aucs: Mapping[str, float], num_samples: int = NUM_SAMPLES, seed: int = 0
) -> dict[str, dict[str, Floats]]:
    """Return measure -> run -> values [num_samples]; each sample uses the same blocks in every run.
    `runs` maps a run to its blocks, `aucs` to its AUC. NaN if the resampled rows have only one
    class.
    """
    names = list(runs)
    num_blocks = len(runs[names[0]].rows)
    columns = np.concatenate(
        [
            np.stack([blocks.weight, blocks.labels, blocks.predictions, blocks.loss, blocks.auc_term])
            for blocks in runs.values()
        ]
    ).T
    random, share = np.random.default_rng(seed), np.full(num_blocks, 1.0 / num_blocks)
    sums = np.concatenate(
        [
            random.multinomial(num_blocks, share, size=min(SAMPLES_AT_ONCE, num_samples - begin)) @ columns
            for begin in range(0, num_samples, SAMPLES_AT_ONCE)
        ]
    ).reshape(num_samples, len(names), 5)
    weight, labels, predictions, loss, auc_term = (sums[:, :, index] for index in range(5))
    rate = labels / weight
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
        found = {"ne": loss / weight / entropy, "logloss": loss / weight, "calibration": predictions / labels}
    found["auc"] = auc_term + np.array([aucs[name] for name in names])
    has_both = (labels > 0) & (labels < weight)  # rows of one class have no NE and no AUC
    found |= {measure: np.where(has_both, found[measure], np.nan) for measure in ("ne", "calibration", "auc")}
    return {measure: {name: found[measure][:, index] for index, name in enumerate(names)} for measure in MEASURES}


def difference(
    baseline: Mapping[int, str],
    variant: Mapping[int, str],
    values: Mapping[str, float],
    resampled: Mapping[str, Floats],
    confidence: float,
) -> Difference:
    """Return the difference of two variants, which are given as seed -> run. `values` and
    `resampled` hold the metric of every run.
    """
    value = _mean(values[run] for run in variant.values()) - _mean(values[run] for run in baseline.values())
    on_rows = _mean(resampled[run] for run in variant.values()) - _mean(resampled[run] for run in baseline.values())
    of_rows = float(np.nanvar(on_rows, ddof=1))
    if len(baseline) + len(variant) == 2:
        return Difference(value, _quantile(confidence) * math.sqrt(of_rows), confidence, False)
    if baseline.keys() == variant.keys() and len(baseline) >= MIN_PAIRED:
        of_seeds, freedom = _paired(baseline, variant, values)
    else:
        of_seeds, freedom = _pooled(baseline, variant, values)
    total = of_rows + of_seeds
    # Satterthwaite 1946: the rows' part has infinite degrees of freedom.
    effective = freedom * (total / of_seeds) ** 2 if of_seeds else math.inf
    return Difference(value, _quantile(confidence, effective) * math.sqrt(total), confidence, True)


def _paired(baseline: Mapping[int, str], variant: Mapping[int, str], values: Mapping[str, float]) -> tuple[float, int]:
    """Return the variance of the mean difference, and its degrees of freedom."""
    differences = [values[variant[seed]] - values[baseline[seed]] for seed in baseline]
    return float(np.var(differences, ddof=1)) / len(differences), len(differences) - 1


def _pooled(baseline: Mapping[int, str], variant: Mapping[int, str], values: Mapping[str, float]) -> tuple[float, int]:
    """Return the same as _paired, assuming that the variance between seeds is equal in both variants."""
    groups = [[values[run] for run in each.values()] for each in (baseline, variant)]
    freedom = sum(map(len, groups)) - 2
    squares = sum(float(np.var(group)) * len(group) for group in groups)
    return squares / freedom * sum(1 / len(group) for group in groups), freedom


def _mean(values):  # type: ignore[no-untyped-def]
    found = list(values)
    return sum(found) / len(found)


def _quantile(confidence: float, freedom: float = math.inf) -> float:
    return float(student.ppf(0.5 + confidence / 2, freedom))


def same_rows(blocks: Sequence[Blocks]) -> bool:
    """Return True if all evaluations used the same rows, judged by the sizes and labels of blocks."""
    return all(
        np.array_equal(each.rows, blocks[0].rows) and np.array_equal(each.labels, blocks[0].labels)
        for each in blocks[1:]
    )
