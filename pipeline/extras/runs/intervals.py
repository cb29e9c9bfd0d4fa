"""Say how sure a difference between models is: a paired bootstrap over blocks of rows, and the spread between seeds.

Two sources of chance, added as variances. Which rows the split happened to hold: blocks of rows are drawn anew, the same for all
models, so what makes a row hard for all of them cancels (Efron and Tibshirani 1993). Which seed a model was trained
with: runs that differ in nothing else show it, and Student's t allows for their being few. Where both variants have the same
seeds, three at least, their runs are paired too: a seed gives both the same initial weights and order of rows.
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
MIN_PAIRED = 3  # of two pairs Student's t makes so wide an interval that nothing is ever called
MEASURES = ("ne", "logloss", "auc", "calibration")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """A variant's mean metric less the baseline's.

    half_width: of the interval around it; its chance to hold the truth is the confidence asked for. seeds_known: the
    interval allows for other seeds; otherwise it is about these two models on other rows, and says nothing of their configs.
    """

    value: float
    half_width: float
    confidence: float
    seeds_known: bool

    @property
    def is_significant(self) -> bool:
        """Whether 0 lies outside the interval."""
        return abs(self.value) > self.half_width

    @property
    def is_called(self) -> bool:
        """Whether the variants, not only two models of them, are said to differ."""
        return self.is_significant and self.seeds_known


def resampled_measures(
    runs: Mapping[str, Blocks], aucs: Mapping[str, float], num_samples: int = NUM_SAMPLES, seed: int = 0
) -> dict[str, dict[str, Floats]]:
    """measure -> run -> [num_samples], of the same blocks in every run: run -> its blocks, and its AUC.

    NaN where the rows that were drawn are of one class.
    """
    names = list(runs)
    num_blocks = len(runs[names[0]].rows)
    columns = np.concatenate(
        [np.stack([blocks.rows, blocks.labels, blocks.predictions, blocks.loss, blocks.auc_term]) for blocks in runs.values()]
    ).T  # fmt: skip
    random, share = np.random.default_rng(seed), np.full(num_blocks, 1.0 / num_blocks)
    sums = np.concatenate(
        [
            random.multinomial(num_blocks, share, size=min(SAMPLES_AT_ONCE, num_samples - begin)) @ columns
            for begin in range(0, num_samples, SAMPLES_AT_ONCE)
        ]
    ).reshape(num_samples, len(names), 5)
    rows, labels, predictions, loss, auc_term = (sums[:, :, index] for index in range(5))
    rate = labels / rows
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
        found = {"ne": loss / rows / entropy, "logloss": loss / rows, "calibration": predictions / labels}
    found["auc"] = auc_term + np.array([aucs[name] for name in names])
    has_both = (labels > 0) & (labels < rows)  # rows of one class have no NE, and no AUC
    found |= {measure: np.where(has_both, found[measure], np.nan) for measure in ("ne", "calibration", "auc")}
    return {measure: {name: found[measure][:, index] for index, name in enumerate(names)} for measure in MEASURES}


def difference(
    baseline: Mapping[int, str], variant: Mapping[int, str], values: Mapping[str, float],
    resampled: Mapping[str, Floats], confidence: float,
) -> Difference:  # fmt: skip
    """Of two variants, each seed -> run; `values` and `resampled` have every run's metric, measured and on resampled rows."""
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
    # Satterthwaite 1946: the rows' part has, in effect, no end of degrees of freedom.
    effective = freedom * (total / of_seeds) ** 2 if of_seeds else math.inf
    return Difference(value, _quantile(confidence, effective) * math.sqrt(total), confidence, True)


def _paired(baseline: Mapping[int, str], variant: Mapping[int, str], values: Mapping[str, float]) -> tuple[float, int]:
    """Variance of the mean difference, and its degrees of freedom."""
    differences = [values[variant[seed]] - values[baseline[seed]] for seed in baseline]
    return float(np.var(differences, ddof=1)) / len(differences), len(differences) - 1


def _pooled(baseline: Mapping[int, str], variant: Mapping[int, str], values: Mapping[str, float]) -> tuple[float, int]:
    """As _paired; the spread between seeds is taken to be the same in both."""
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
    """Whether all were measured on the same rows, as far as the blocks' sizes and labels tell."""
    first = blocks[0]
    return all(
        np.array_equal(each.rows, first.rows) and np.array_equal(each.labels, first.labels) for each in blocks[1:]
    )
