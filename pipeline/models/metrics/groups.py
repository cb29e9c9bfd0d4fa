"""Compute GAUC, NDCG@k and hit rate@k of groups of rows.

GAUC is the mean of the groups' AUCs, weighted by their rows (Zhou et al. 2018, Deep Interest
Network, section 6.2). A row of weight w occupies w positions of the ranking. If only a part of a
row is within the first k positions, only this part counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.quality import Floats


def group_metrics(
    groups: NDArray[np.int64],
    scores: NDArray[np.floating],
    labels: NDArray[np.number],
    at: Sequence[int],
    weights: NDArray[np.floating] | None = None,
) -> dict[str, float]:
    """Return gauc, ndcg_at_<k>, hit_rate_at_<k>, num_groups and num_one_class_groups of rows [n].

    weights: of the rows, 1 by default.

    Each group counts once in ndcg and hit rate. A group with labels of one class is left out of all
    metrics and only counted. For rows with equal scores the mean over all their orders is used, so
    the order of rows does not matter. Metrics are NaN if every group is left out.
    """
    return metrics_of(group_sums(groups, scores, labels, at, np.ones(len(labels)) if weights is None else weights), at)


def group_sums(
    groups: NDArray[np.int64],
    scores: NDArray[np.floating],
    labels: NDArray[np.number],
    at: Sequence[int],
    weights: NDArray[np.floating],
) -> Floats:
    """Return the sums over groups from which metrics_of computes the metrics."""
    ties, num_groups = _ties_of(groups, scores, labels, weights)
    positives, rows = ties.total(ties.positives), ties.total(ties.sizes)
    ranked = (positives > 0) & (positives < rows)
    values = [_aucs(ties, positives, rows) * rows, rows]
    values += [_ndcg(ties, positives, k) for k in at] + [_hits(ties, k) for k in at]
    return np.array([num_groups, ranked.sum(), *(each[ranked].sum() for each in values)])


def metrics_of(sums: Floats, at: Sequence[int]) -> dict[str, float]:
    """Return the metrics, as group_metrics does."""
    num_groups, num_ranked, aucs, rows, *means = sums.tolist()
    names = [*(f"ndcg_at_{k}" for k in at), *(f"hit_rate_at_{k}" for k in at)]
    found = {"gauc": aucs / rows if rows else math.nan}
    found |= {name: each / num_ranked if num_ranked else math.nan for name, each in zip(names, means, strict=True)}
    return found | {"num_groups": int(num_groups), "num_one_class_groups": int(num_groups - num_ranked)}


@dataclass(frozen=True)
class _Ties:
    """Hold ties: runs of rows of one group with equal scores, sorted by group, then best first.

    All fields are [num_ties], except `firsts` [num_groups]. Rows and positives count by weight.
    """

    sizes: Floats
    positives: Floats
    before: Floats  # rows of the group with a higher score
    positives_before: Floats
    firsts: NDArray[np.int64]  # the index of each group's first run

    def total(self, values: Floats) -> Floats:
        """Return [num_groups]: the sum of `values` [num_ties] over the ties of each group."""
        sums: Floats = np.add.reduceat(values, self.firsts) if len(self.firsts) else np.zeros(0)
        return sums


def _ties_of(
    groups: NDArray[np.int64], scores: NDArray[np.floating], labels: NDArray[np.number], weights: NDArray[np.floating]
) -> tuple[_Ties, int]:
    order = np.lexsort((-scores, groups))
    groups, scores, labels, weights = groups[order], scores[order], labels[order], weights[order].astype(np.float64)
    new_group = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    new_tie = new_group.copy()
    new_tie[1:] |= scores[1:] != scores[:-1]
    starts = np.flatnonzero(new_tie)
    sizes, positives = (
        np.add.reduceat(values, starts) if len(starts) else np.zeros(0) for values in (weights, weights * labels)
    )
    firsts = np.flatnonzero(new_group[starts])
    group_of = np.cumsum(new_group[starts]) - 1
    before, positives_before = (np.cumsum(values) - values for values in (sizes, positives))
    before, positives_before = (values - values[firsts][group_of] for values in (before, positives_before))
    return _Ties(sizes, positives, before, positives_before, firsts), len(firsts)


def _aucs(ties: _Ties, positives: Floats, rows: Floats) -> Floats:
    """Return the AUC of each group [num_groups]. The value of a group with one class has no meaning."""
    above = (ties.sizes - ties.positives) * (ties.positives_before + ties.positives / 2)
    pairs = positives * (rows - positives)  # below 1 if weights are small
    aucs: Floats = ties.total(above) / np.where(pairs > 0, pairs, 1.0)
    return aucs


def _ndcg(ties: _Ties, positives: Floats, k: int) -> Floats:
    """Return the NDCG of each group [num_groups]. Rows with equal scores share their positives
    evenly over their positions (McSherry, Najork 2008).
    """
    discounts = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(k) + 2.0))])
    places = np.arange(k + 1.0)
    first, last, best = (np.interp(at, places, discounts) for at in (ties.before, ties.before + ties.sizes, positives))
    gains = ties.positives / ties.sizes * (last - first)
    ndcg: Floats = ties.total(gains) / np.where(best > 0, best, 1.0)
    return ndcg


def _hits(ties: _Ties, k: int) -> Floats:
    """Return [num_groups]: the probability that a positive is among the first k, over all orders of equal scores."""
    end = ties.before + ties.sizes
    missed = np.where((ties.positives > 0) & (end <= k), 0.0, 1.0)
    for run in np.flatnonzero((ties.before < k) & (end > k) & (ties.positives > 0)):
        # without replacement: the chance that each of the first places goes to a negative
        places = k - ties.before[run]
        taken = np.arange(math.ceil(places))
        left = np.maximum(ties.sizes[run] - ties.positives[run] - taken, 0.0) / (ties.sizes[run] - taken)
        chances = np.append(1.0, np.cumprod(left))
        missed[run] = np.interp(places, np.arange(len(chances)), chances)
    products = np.multiply.reduceat(missed, ties.firsts) if len(ties.firsts) else np.zeros(0)
    hits: Floats = 1.0 - products
    return hits
