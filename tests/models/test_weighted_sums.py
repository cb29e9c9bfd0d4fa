"""A row of weight 2 counts as two equal rows in every function that sums over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.retraining import GateConfig
from pipeline.data.quality import auc, log_losses, normalized_entropy
from pipeline.data.targets import Target
from pipeline.devices.process_group import init_distributed
from pipeline.extras.models.metrics.gauc import GroupedAuc
from pipeline.extras.models.metrics.recalibrated_ne import RecalibratedNe
from pipeline.extras.models.metrics.segmented_ne import SegmentedNe
from pipeline.extras.models.metrics.xauc import Xauc
from pipeline.extras.models.tasks.retrieval_metrics import RetrievalMetrics, RetrievalPrediction
from pipeline.extras.runs import permutation
from pipeline.extras.runs.evaluation_stats import Blocks, summarize_rows
from pipeline.models.metrics.brier import Brier
from pipeline.models.metrics.ece import ExpectedCalibrationError
from pipeline.models.metrics.groups import group_metrics
from pipeline.models.tasks.click_metrics import ScoreCounts, auprc
from pipeline.retraining.gate import HeldScores, Scores, judge
from pipeline.retraining.statistics import _quantiles
from pipeline.serving.artifact.task_quality import LabelledRows, compare, qualities
from tests.support.ranks import RankPool

NUM_ROWS = 400
Rows = dict[str, np.ndarray]


def rows_of(seed: int) -> tuple[Rows, Rows]:
    """Rows with whole weights, and the same rows as often as their weight says."""
    draw = np.random.default_rng(seed)
    rows = {
        "weights": draw.integers(1, 4, NUM_ROWS).astype(np.float32),
        "labels": draw.integers(0, 2, NUM_ROWS).astype(np.float32),
        "logits": np.round(draw.normal(-1, 1, NUM_ROWS), 1).astype(np.float32),  # with ties
        "others": np.round(draw.normal(-1, 1, NUM_ROWS), 1).astype(np.float32),
        "groups": draw.integers(1, 30, NUM_ROWS),
        "blocks": np.arange(NUM_ROWS) // 40,
    }
    repeated = {name: np.repeat(values, rows["weights"].astype(int)) for name, values in rows.items()}
    return rows, repeated | {"weights": np.ones(len(repeated["labels"]), np.float32)}


def measures(rows: Rows) -> dict[str, Any]:
    logits, labels, weights, groups = (rows[name] for name in ("logits", "labels", "weights", "groups"))
    scores, losses, wide = 1 / (1 + np.exp(-logits.astype(float))), log_losses(logits, labels), weights.astype(float)
    counts = ScoreCounts()
    counts.add(logits, labels.astype(np.uint8), weights)
    blocks, bins = summarize_rows(rows["blocks"], logits, labels.astype(np.uint8), 10, weights)
    found: dict[str, Any] = {
        "auc": auc(logits, labels, weights),
        "auprc": auprc(logits, labels, weights),
        "ne": normalized_entropy(losses, labels, wide),
        "buckets": [*counts.auc(), *counts.auprc()],
        "bins": [value for each in bins for value in (each.prediction, each.label_rate)],
        "quantiles": _quantiles(rows["others"], wide).tolist(),
    }
    found |= {name: getattr(blocks, name).tolist() for name in Blocks.__annotations__ if name != "rows"}
    found |= {f"groups {k}": v for k, v in group_metrics(groups, logits, labels, [1, 3, 10], weights).items()}
    for metric in (Brier(), ExpectedCalibrationError(), RecalibratedNe()):
        found[type(metric).__name__] = metric.value(metric.sums(scores, labels.astype(float), wide))
    for grouped in (GroupedAuc(), SegmentedNe(), Xauc()):
        sums = grouped.sums_of_groups(scores, rows["blocks"] if grouped.of_all_rows else labels, wide, groups)
        found[type(grouped).__name__] = grouped.value(sums)
    return found | _of_the_gate(rows) | _of_the_certificate(scores, rows)


def _of_the_gate(rows: Rows) -> dict[str, Any]:
    """All but the bootstrap's bound, which resamples other blocks, and counts of rows."""
    models = [
        Scores(
            rows[name],
            rows["labels"],
            {"group": rows["groups"]},
            rows["weights"],
            {"buy": HeldScores(log_losses(rows[name], rows["labels"]) * rows["weights"], rows["labels"])},
        )
        for name in ("logits", "others")
    ]
    verdict = judge(models[0], models[1], GateConfig(min_rows=10, slices={"group": 0.1}, slice_min_rows=1))
    found: dict[str, Any] = {k: v for k, v in verdict.metrics.items() if k not in ("eval_rows", "ne_ratio_upper")}
    return found | {each.name: each.value for each in verdict.findings if each.name not in ("rows", "ne")}


def _of_the_certificate(scores: np.ndarray, rows: Rows) -> dict[str, Any]:
    targets = [Target("click"), Target("spend", "regression")]
    labels = np.stack([rows["labels"], rows["groups"]], axis=1).astype(float)
    labelled = LabelledRows(targets, labels, np.repeat(rows["weights"][:, None], 2, axis=1).astype(float))
    model, artifact = (np.stack([shift * scores, labels[:, 1] + shift * rows["others"]], axis=1) for shift in (1, 0.9))
    parity = compare(model, artifact, labelled, qualities(labelled, model)).as_dict()
    return {f"{name} {k}": v for name, each in parity["tasks"].items() for k, v in each.items() if k != "rows"}


@pytest.mark.parametrize("seed", range(2))
def test_a_row_of_weight_2_counts_as_two_rows(seed: int) -> None:
    weighted, repeated = (measures(rows) for rows in rows_of(seed))
    assert weighted.keys() == repeated.keys() and len(weighted) > 25
    for name, value in weighted.items():
        assert value == pytest.approx(repeated[name], rel=1e-5, abs=1e-9, nan_ok=True), name
    rows, _ = rows_of(seed)
    ignored = measures(rows | {"weights": np.ones(NUM_ROWS, np.float32)})
    assert all(ignored[name] != pytest.approx(weighted[name], rel=1e-6) for name in ("auc", "bins", "groups gauc"))


def test_fractions_of_a_position_lie_between_whole_ones() -> None:
    groups, scores, labels = np.array([1, 1, 1]), np.array([3.0, 2.0, 1.0]), np.array([0, 1, 0])
    found = [
        group_metrics(groups, scores, labels, [2], np.array([first, 1.0, 1.0]))["ndcg_at_2"] for first in (0.5, 1, 1.5)
    ]
    assert found[0] > found[1] > found[2] > 0


def _importance(rows: Rows) -> dict[str, Any]:
    """The importance of a feature whose shuffled losses are `others`."""
    weights, labels, before, after = (
        torch.from_numpy(rows[name]).double() for name in ("weights", "labels", "logits", "others")
    )
    parts = (torch.ones(len(weights)), labels, before)
    sums = {"": [[float(len(weights)), *(float((weights * part).sum()) for part in parts)]]}
    permutation._add(sums, {"": (weights, labels, before)}, {"": (weights, labels, after)})
    found, _ = permutation._summarized(["feature"], np.array(sums[""]))
    assert found is not None
    return found


def test_importance_weighs_rows_and_its_error_counts_independent_rows() -> None:
    rows, repeated = rows_of(3)
    weighted, copied = _importance(rows), _importance(repeated)
    assert weighted["ne"] == pytest.approx(copied["ne"])
    of_weighted, of_copied = weighted["features"]["feature"], copied["features"]["feature"]
    assert of_weighted["ne_increase"] == pytest.approx(of_copied["ne_increase"])
    assert of_weighted["error"] > 1.2 * of_copied["error"]  # a copy is not another independent row
    plain = _importance(rows | {"weights": np.ones(NUM_ROWS, np.float32)})["features"]["feature"]
    change = (rows["others"] - rows["logits"]).astype(float)
    rate = float(rows["labels"].mean())
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    assert plain["error"] == pytest.approx(float(change.std(ddof=1) / np.sqrt(NUM_ROWS) / entropy))


def _retrieved(rank: int) -> list[dict[str, float]]:
    return [_retrieved_of(repeats) for repeats in (False, True)]


def _retrieved_of(repeats: bool) -> dict[str, float]:
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(20, 3, generator=draw)
    ids, users = torch.randint(1, 20, (50,), generator=draw), torch.randn(50, 3, generator=draw)
    labels, weights = torch.randint(0, 2, (50,), generator=draw).float(), torch.randint(1, 4, (50,), generator=draw)
    if repeats:
        ids, users, labels = (part.repeat_interleave(weights, dim=0) for part in (ids, users, labels))
        weights = torch.ones(len(ids))
    nothing = torch.zeros(len(ids))
    measure = RetrievalMetrics(init_distributed(), [1, 5])
    measure.update(RetrievalPrediction(nothing.sum(), nothing, labels, weights.float(), users, vectors[ids], ids))
    return measure.compute()


def test_recall_weighs_clicked_rows(ranks: RankPool) -> None:
    weighted, repeated = ranks.run(1, _retrieved)[0]
    names = ("recall_at_1", "recall_at_5", "mrr")
    assert [weighted[name] for name in names] == pytest.approx([repeated[name] for name in names])
