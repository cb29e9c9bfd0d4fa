"""The registered metrics equal TorchRec's on random rows, and their definitions where TorchRec counts batch by batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torchrec.metrics.gauc import compute_gauc_3d
from torchrec.metrics.ne_with_recalibration import RecalibratedNEMetricComputation
from torchrec.metrics.segmented_ne import compute_ne, get_segemented_ne_states
from torchrec.metrics.xauc import compute_error_sum, compute_weighted_num_pairs

from pipeline.data.quality import probabilities
from pipeline.devices.process_group import init_distributed
from pipeline.extras.models.metrics.gauc import GroupedAuc
from pipeline.extras.models.metrics.recalibrated_ne import RecalibratedNe
from pipeline.extras.models.metrics.segmented_ne import SegmentedNe
from pipeline.extras.models.metrics.xauc import Xauc, concordant
from pipeline.models.tasks import group_metrics
from pipeline.models.tasks.group_metrics import NamedMetrics
from tests.support.ranks import RankPool

NUM_ROWS, GROUPS = 400, 8


@pytest.fixture
def rows() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    logits = draw.normal(-0.5, 2, NUM_ROWS)
    return {
        "scores": probabilities(logits),
        "labels": (draw.random(NUM_ROWS) < probabilities(logits - 0.8)).astype(np.float64),
        "seconds": logits + draw.normal(0, 2, NUM_ROWS),
        "weights": draw.integers(1, 4, NUM_ROWS).astype(np.float64),
        "groups": 1 + np.arange(NUM_ROWS) % GROUPS,
    }


def test_xauc_is_torchrecs_for_distinct_values(rows: dict[str, np.ndarray]) -> None:
    sums = Xauc().sums_of_groups(rows["scores"], rows["seconds"], rows["weights"], np.ones(NUM_ROWS, np.int64))
    labels, scores, weights = (torch.from_numpy(rows[name])[None] for name in ("seconds", "scores", "weights"))
    expected = compute_error_sum(labels, scores, weights) / compute_weighted_num_pairs(weights)
    assert Xauc().value(sums) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_pairs_in_order_are_counted_exactly_with_ties_groups_and_weights(seed: int) -> None:
    draw = np.random.default_rng(seed)
    scores, labels, weights, groups = (draw.integers(0, high, 70).astype(float) for high in (9, 6, 4, 4))
    weights, groups = weights + 1, np.unique(groups, return_inverse=True)[1]
    ordered, pairs = concordant(scores, labels, weights, groups)
    for group in range(4):
        mine = groups == group
        one = np.outer(weights[mine], weights[mine]) * (labels[mine][:, None] > labels[mine])
        above = scores[mine][:, None] - scores[mine]
        assert pairs[group] == one.sum() and ordered[group] == (one * ((above > 0) + (above == 0) / 2)).sum()
    assert np.isnan(Xauc().value(Xauc().sums_of_groups(scores, np.zeros(70), weights, groups)))


def test_gauc_is_torchrecs_for_groups_of_equal_size(rows: dict[str, np.ndarray]) -> None:
    ones = np.ones(NUM_ROWS)
    sums = GroupedAuc().sums_of_groups(rows["scores"], rows["labels"], ones, rows["groups"])
    order = np.argsort(rows["groups"], kind="stable")
    parts = (torch.from_numpy(each[order]).reshape(1, GROUPS, -1) for each in (rows["scores"], rows["labels"], ones))
    found = compute_gauc_3d(*parts)
    assert GroupedAuc().value(sums) == pytest.approx(float(found["auc_sum"] / found["num_samples"]), abs=1e-9)


def test_segmented_ne_divides_torchrecs_sums_of_all_segments(rows: dict[str, np.ndarray]) -> None:
    sums = SegmentedNe().sums_of_groups(rows["scores"], rows["labels"], rows["weights"], rows["groups"])
    tensors = [torch.from_numpy(rows[name]) for name in ("labels", "scores", "weights")]
    states = get_segemented_ne_states(*tensors, torch.from_numpy(rows["groups"] - 1), 1e-12, GROUPS)
    names = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    losses = states[names[0]]
    ne = compute_ne(*(states[name] for name in names), GROUPS, 1e-12)
    assert SegmentedNe().value(sums) == pytest.approx(float(losses.sum() / (losses / ne).sum()), abs=1e-6)


def test_recalibrated_ne_is_the_least_of_torchrecs(rows: dict[str, np.ndarray]) -> None:
    metric = RecalibratedNe()
    found = metric.value(metric.sums(rows["scores"], rows["labels"], rows["weights"]))

    def torchrecs(coefficient: float) -> float:
        computation: Any = RecalibratedNEMetricComputation(
            my_rank=0, batch_size=NUM_ROWS, n_tasks=1, window_size=NUM_ROWS, recalibration_coefficient=coefficient
        )
        values = {name: torch.from_numpy(rows[name])[None] for name in ("labels", "weights")}
        computation.update(predictions=torch.from_numpy(rows["scores"])[None], **values)
        return float(computation._compute()[0].value)

    nes = [torchrecs(float(np.exp(shift))) for shift in np.linspace(-2, 2, 201)]
    assert found == pytest.approx(min(nes), abs=2e-5) and found < min(nes) + 1e-9 and torchrecs(1.0) > found + 0.01


def measured_on_rank(rank: int, paired_rows: int) -> dict[str, float]:
    """Collective: of eight batches every world_size-th. The last rank of three has the fewest."""
    context, names = init_distributed(), ["gauc", "segmented_ne", "xauc", "recalibrated_ne"]
    with patch.object(group_metrics, "PAIRED_ROWS", paired_rows):
        named = NamedMetrics(context, names, num_rows=240)
    for number in range(context.rank, 8, context.world_size):
        draw = torch.Generator().manual_seed(number)
        logits, labels = torch.randn(30, generator=draw), torch.randint(0, 2, (30,), generator=draw).float()
        weights = torch.randint(0, 3, (30,), generator=draw).float()
        groups = torch.randint(0, 5, (30,), generator=draw) * 2**59
        batch: Any = SimpleNamespace(groups=groups)
        seconds = SimpleNamespace(logits=logits, labels=10 * labels + logits, sample_weights=weights)
        clicks = SimpleNamespace(logits=logits, labels=labels, sample_weights=weights)
        named.update({"click/": clicks}, batch, {"seconds/": seconds})
    return named.compute()


@pytest.mark.long
def test_any_number_of_ranks_measures_the_same(ranks: RankPool) -> None:
    one, two, three = (ranks.run(size, measured_on_rank, 1 << 20) for size in (1, 2, 3))
    names = {"click/gauc", "click/segmented_ne", "click/xauc", "seconds/xauc", "click/recalibrated_ne"}
    assert one[0].keys() == names and all(0.2 < value < 2 for value in one[0].values())
    assert all(each == pytest.approx(one[0], abs=1e-12) for each in (*two, *three))
    (in_parts,) = ranks.run(1, measured_on_rank, 60)
    assert 1e-6 < abs(in_parts["click/xauc"] - one[0]["click/xauc"]) < 0.05
