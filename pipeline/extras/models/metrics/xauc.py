"""Compute XAUC: the share of pairs of rows that the predictions order as the labels do (Zhan et al. 2022,
Deconfounding Duration Bias in Watch-time Prediction, section 5.1.3).

Pairs with equal labels do not count. A pair with equal predictions counts half. So the XAUC of a
binary label is its AUC. xauc:user_id is the mean over the users, weighted by rows, as in GAUC. Of a
split of more than 1,048,576 rows, only pairs within each of several parts of the batches count.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipeline.config.registry import register
from pipeline.data.quality import Floats
from pipeline.models.metrics.metric import GroupMetric


@register("metric", "xauc")
class Xauc(GroupMetric):
    higher_is_better = True
    kinds = ("binary", "number")
    of_all_rows = True

    def sums_of_groups(
        self, predictions: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]
    ) -> Floats:  # fmt: skip
        """Local: return the sum over groups of XAUC times the group's weight, and the sum of weights."""
        known = groups != 0
        number_of = np.unique(groups[known], return_inverse=True)[1]
        ordered, pairs = concordant(predictions[known], labels[known], weights[known], number_of)
        rows = np.bincount(number_of, weights[known])
        ranked = pairs > 0
        return np.array([(ordered[ranked] / pairs[ranked] * rows[ranked]).sum(), rows[ranked].sum()])

    def value(self, sums: Floats) -> float:
        return float(sums[0] / sums[1]) if sums[1] else math.nan


def concordant(
    predictions: Floats, labels: Floats, weights: Floats, groups: NDArray[np.int64]
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return two arrays [num_groups]: the weight of pairs in the order of their labels, and of all
    pairs whose labels differ. groups: 0 to num_groups - 1.

    A pair is counted at the first bit in which the ranks of the labels differ (Claude and Navarro 2012,
    The Wavelet Matrix). At each bit the rows are ordered by the higher bits, then by the prediction.
    """
    if not len(predictions):
        return np.zeros(0), np.zeros(0)
    order = np.lexsort((labels, groups))
    is_new_group = np.append(True, groups[order][1:] != groups[order][:-1])
    is_new = is_new_group | np.append(True, labels[order][1:] != labels[order][:-1])
    rank = np.empty(len(order), np.int64)
    dense = np.cumsum(is_new)
    rank[order] = dense - dense[np.maximum.accumulate(np.where(is_new_group, np.arange(len(order)), 0))]
    of_label = np.bincount(dense - 1, weights[order])
    group_of_label = groups[order][is_new]
    pairs = (np.bincount(groups, weights) ** 2 - np.bincount(group_of_label, of_label**2)) / 2
    pairs[np.bincount(group_of_label) == 1] = 0.0  # exactly, in spite of rounding

    found = np.zeros(len(pairs))
    order = np.lexsort((predictions, groups))
    num_bits = int(rank.max()).bit_length()
    for bit in reversed(range(num_bits)):
        node = (groups[order] << (num_bits - bit)) + (rank[order] >> (bit + 1))
        moved = np.argsort(node, kind="stable")  # within a node, rows stay in the order of predictions
        order, node = order[moved], node[moved]
        is_high = (rank[order] >> bit) & 1 == 1
        below = _low_below(node, predictions[order], np.where(is_high, 0.0, weights[order]))
        found += np.bincount(groups[order], np.where(is_high, weights[order] * below, 0.0), len(pairs))
    return found, pairs


def _low_below(node: NDArray[np.int64], predictions: Floats, weights: Floats) -> Floats:
    """Return [n]: the weight of the rows of the same node that have a lower prediction, and half of the
    weight of those with an equal one. Rows are in the order of node and prediction.
    """
    starts_node = np.append(True, node[1:] != node[:-1])
    starts_tie = starts_node | np.append(True, predictions[1:] != predictions[:-1])
    before = np.append(0.0, np.cumsum(weights))
    at = np.arange(len(node))
    node_begin, tie_begin = (np.maximum.accumulate(np.where(starts, at, 0)) for starts in (starts_node, starts_tie))
    tie_end = np.append(np.flatnonzero(starts_tie)[1:], len(node))[np.cumsum(starts_tie) - 1]
    below: Floats = (before[tie_begin] + before[tie_end]) / 2 - before[node_begin]
    return below
