"""GAUC, NDCG@k and hit rate@k equal their definitions, worked out group by group over all orders of equal scores."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.devices.process_group import init_distributed
from pipeline.models.metrics.groups import group_metrics
from pipeline.models.tasks.group_metrics import GroupMeasure
from tests.support.ranks import RankPool

AT = [1, 3, 10]


def orders(scores: list[float], labels: list[int]) -> list[list[int]]:
    """The labels, best score first, in every order of equal scores."""
    blocks = [
        [label for score, label in zip(scores, labels, strict=True) if score == value]
        for value in sorted(set(scores), reverse=True)
    ]
    every = itertools.product(*(list(itertools.permutations(block)) for block in blocks))
    return [[label for block in order for label in block] for order in every]


def one_group(scores: list[float], labels: list[int]) -> dict[str, float]:
    """By definition: the mean over all orders."""
    found: dict[str, list[float]] = {}
    for order in orders(scores, labels):
        pairs = [(i, j) for i in range(len(order)) for j in range(len(order)) if order[i] > order[j]]
        found.setdefault("auc", []).append(sum(i < j for i, j in pairs) / len(pairs))
        for k in AT:
            gain = sum(label / math.log2(i + 2) for i, label in enumerate(order[:k]))
            best = sum(1 / math.log2(i + 2) for i in range(min(k, sum(labels))))
            found.setdefault(f"ndcg_at_{k}", []).append(gain / best)
            found.setdefault(f"hit_rate_at_{k}", []).append(float(any(order[:k])))
    return {name: sum(values) / len(values) for name, values in found.items()}


def drawn(seed: int, num_rows: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    groups = draw.choice(draw.integers(-(2**62), 2**62, 14), num_rows)
    return groups, draw.integers(0, 5, num_rows).astype(np.float32), draw.integers(0, 2, num_rows)


def by_definition(groups: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    ranked, rows, one_class = [], [], 0
    for group in np.unique(groups):
        mine = groups == group
        if 0 < labels[mine].sum() < mine.sum():
            ranked.append(one_group(scores[mine].tolist(), labels[mine].tolist()))
            rows.append(int(mine.sum()))
        else:
            one_class += 1
    found = {name: sum(each[name] for each in ranked) / len(ranked) for name in ranked[0] if name != "auc"}
    found["gauc"] = sum(each["auc"] * count for each, count in zip(ranked, rows, strict=True)) / sum(rows)
    return found | {"num_groups": len(np.unique(groups)), "num_one_class_groups": one_class}


@pytest.mark.parametrize("seed", range(3))
def test_group_metrics_equal_their_definitions(seed: int) -> None:
    groups, scores, labels = drawn(seed)
    expected = by_definition(groups, scores, labels)
    assert group_metrics(groups, scores, labels, AT) == pytest.approx(expected, abs=1e-12)
    order = np.random.default_rng(9).permutation(len(groups))
    assert group_metrics(groups[order], scores[order], labels[order], AT) == pytest.approx(expected, abs=1e-12)


def test_gauc_does_not_depend_on_the_scale_of_the_weights() -> None:
    groups, scores, labels = drawn(0)
    expected = by_definition(groups, scores, labels)["gauc"]
    found = group_metrics(groups, scores, labels, AT, np.full(len(groups), 0.01, np.float32))
    assert found["gauc"] == pytest.approx(expected, abs=1e-6)


def test_groups_of_one_class_are_left_out_and_counted() -> None:
    groups = np.array([7, 7, 7, 8, 8, 9, 9])
    scores = np.array([0.1, 0.9, 0.5, 0.3, 0.2, 0.6, 0.7])
    labels = np.array([1, 1, 0, 0, 0, 1, 1])
    found = group_metrics(groups, scores, labels, [1])
    assert found == {"gauc": 0.5, "ndcg_at_1": 1.0, "hit_rate_at_1": 1.0, "num_groups": 3, "num_one_class_groups": 2}
    nothing = group_metrics(groups[:0], scores[:0], labels[:0], [1])
    assert nothing["num_groups"] == 0 and all(math.isnan(nothing[name]) for name in ("gauc", "ndcg_at_1"))


def _measured(rank: int, world_size: int) -> dict[str, float]:
    """Rank 1 of 3 has no rows; a group's rows are on several ranks."""
    groups, scores, labels = drawn(4)
    measure = GroupMeasure(init_distributed(), AT)
    mine = np.arange(len(groups)) % (world_size - 1 or 1) == (rank if world_size == 1 else {0: 0, 1: 2, 2: 1}[rank])
    for part in np.array_split(np.flatnonzero(mine), 3):
        weights = torch.ones(len(part) + 2)
        weights[-2] = 0.0  # padding
        numbers = [torch.from_numpy(np.append(values[part], [1, 1])).float() for values in (scores, labels)]
        prediction = SimpleNamespace(logits=numbers[0], labels=numbers[1], sample_weights=weights)
        measure.update(prediction, torch.from_numpy(np.append(groups[part], [5, 0])))  # 0: no group
    measure.update(prediction, None)
    return measure.compute()


def test_several_ranks_measure_what_one_does(ranks: RankPool) -> None:
    expected = by_definition(*drawn(4))
    for world_size in (1, 3):
        for found in ranks.run(world_size, _measured, world_size):
            assert found == pytest.approx(expected, abs=1e-12)
