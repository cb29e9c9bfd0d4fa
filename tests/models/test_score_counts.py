"""AUC and AUPRC by buckets are within their stated errors of the exact ones, in memory that rows do not add to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from pipeline.devices.process_group import init_distributed
from pipeline.models.tasks.click import Prediction
from pipeline.models.tasks.click_metrics import BUCKETS, COUNTED_AT_ONCE, ScoreCollector, ScoreCounts, bucket_of
from tests.support.ranks import RankPool


def drawn(num_rows: int, scale: float, digits: int = 9, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    logits = np.round(draw.normal(-1.0, scale, num_rows), digits).astype(np.float32)
    return logits, (draw.random(num_rows) < 0.5 + 0.5 * np.tanh(logits / 2)).astype(np.uint8)


def test_buckets_ascend_with_the_logit() -> None:
    numbers = [-math.inf, -1e9, -300.0, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 1.0, 1.0001, 300.0, math.inf, math.nan]
    buckets = bucket_of(np.array(numbers, np.float32))
    assert (np.diff(buckets) >= 0).all()
    assert buckets[0] == 0 and buckets[-1] == BUCKETS - 1
    assert len(np.unique(buckets[2:-2])) == len(buckets[2:-2])
    assert bucket_of(np.array([-0.0], np.float32)) == bucket_of(np.array([0.0], np.float32))
    ordered = np.sort(drawn(20_000, 3.0)[0])
    assert (np.diff(bucket_of(ordered)) >= 0).all()


@pytest.mark.parametrize(("scale", "digits"), [(2.0, 9), (2.0, 1), (1e-5, 9), (1e4, 9)])
def test_the_exact_measures_are_within_the_stated_errors(scale: float, digits: int) -> None:
    """Also where nearly all rows share a bucket, beyond the smallest or largest magnitude."""
    logits, labels = drawn(20_000, scale, digits)
    logits = logits + 1 if scale == 1e-5 else logits  # about 0
    counts = ScoreCounts()
    for part in np.array_split(np.arange(len(logits)), 3):
        counts.add(logits[part], labels[part], np.ones(len(part)))
    wide = torch.from_numpy(logits.astype(np.float64)) / 2e5 + 0.5  # torchmetrics takes probabilities
    area, precision_area = counts.auc(), counts.auprc()
    exact = float(binary_auroc(wide, torch.from_numpy(labels).long()))
    assert abs(area.value - exact) <= area.error + 1e-6
    exact = float(binary_average_precision(wide, torch.from_numpy(labels).long()))
    assert abs(precision_area.value - exact) <= precision_area.error + 1e-6
    if scale == 2.0 and digits == 9:  # equal scores are of one bucket too, and add to the error that is stated
        assert area.error < 1e-4 and precision_area.error < 1e-3


def test_labels_of_one_kind_have_no_auc() -> None:
    counts = ScoreCounts()
    assert math.isnan(counts.auc().value) and math.isnan(counts.auprc().value)
    counts.add(np.ones(3, np.float32), np.zeros(3, np.uint8), np.ones(3))
    assert math.isnan(counts.auc().value) and math.isnan(counts.auprc().value)


def prediction_of(logits: np.ndarray, labels: np.ndarray) -> Prediction:
    numbers, found = torch.from_numpy(logits), torch.from_numpy(labels).float()
    return Prediction(torch.tensor(0.0), numbers, found, torch.ones(len(numbers)))


def test_a_collector_keeps_no_more_bytes_for_more_rows() -> None:
    collector, kept = ScoreCollector(exact_rows=5000), []
    prediction = prediction_of(*drawn(1 << 18, 2.0))
    for _ in range(16):
        collector.update(prediction)
        kept.append(collector.kept_bytes)
    largest = 2 * BUCKETS * 8 + 9 * COUNTED_AT_ONCE
    assert max(kept) <= largest and kept[0] >= 2 * BUCKETS * 8


def _collected(rank: int, world_size: int, exact_rows: int) -> dict[str, float]:
    context = init_distributed()
    logits, labels = drawn(6000, 2.0, digits=2)
    shares = {1: [6000], 3: [5900, 100, 0]}[world_size]  # one rank passes the limit alone, and one has no rows
    ends = np.cumsum([0, *shares])
    collector = ScoreCollector(exact_rows)
    for part in np.array_split(np.arange(ends[rank], ends[rank + 1]), 4):
        collector.update(prediction_of(logits[part], labels[part]))
    first, second = collector.compute(context), collector.compute(context)
    assert first == second
    return first


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_count_together_what_they_no_longer_keep(ranks: RankPool, world_size: int) -> None:
    exact = ranks.run(1, _collected, 1, 6000)[0]
    assert set(exact) == {"auc", "auprc", "num_samples"}
    for limit in (5999, 50):
        for found in ranks.run(world_size, _collected, world_size, limit):
            assert found["num_samples"] == 6000
            assert abs(found["auc"] - exact["auc"]) <= found["auc_error"] < 0.02
            assert abs(found["auprc"] - exact["auprc"]) <= found["auprc_error"] < 0.02
    for found in ranks.run(world_size, _collected, world_size, 6000):
        assert found == exact
