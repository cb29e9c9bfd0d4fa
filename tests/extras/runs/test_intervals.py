"""Differences between models are called where there are some, and not where chance alone is at work."""

from __future__ import annotations

import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import pytest

from pipeline.data.quality import auc
from pipeline.extras.runs.compare import describe
from pipeline.extras.runs.evaluation_stats import Blocks, EvaluationStats, summarize_rows
from pipeline.extras.runs.intervals import difference, resampled_measures

NUM_BLOCKS, CONFIDENCE = 500, 0.98


def _models(noises: list[float], draw: np.random.Generator, num_rows: int = 20_000) -> list[EvaluationStats]:
    """Models that see the truth through noise of their own on rows, and on 50 groups of rows for their seed's sake."""
    truth = draw.normal(-1.5, 1.0, num_rows)
    labels = (draw.random(num_rows) < 1 / (1 + np.exp(-truth))).astype(np.uint8)
    groups, found = draw.integers(0, 50, num_rows), []
    rate = labels.mean()
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    for noise in noises:
        logits = truth + draw.normal(0, noise, num_rows) + draw.normal(0, 0.02, 50)[groups]
        blocks, bins = summarize_rows(
            np.arange(num_rows) * NUM_BLOCKS // num_rows, logits, labels, NUM_BLOCKS, np.ones(num_rows)
        )
        metrics = {"ne": float(blocks.loss.sum() / num_rows / entropy), "auc": auc(logits, labels)}
        found.append(EvaluationStats("test", 1, "made", metrics, blocks, bins))
    return found


def _is_called(models: list[EvaluationStats], metric: str, same_seeds: bool = False) -> bool:
    """Of the first half of the models as the baseline, and the second half."""
    named = {str(index): model for index, model in enumerate(models)}
    resampled = resampled_measures(
        {name: each.blocks for name, each in named.items()},
        {name: each.metrics["auc"] for name, each in named.items()},
        300,
    )[metric]
    values, half = {name: each.metrics[metric] for name, each in named.items()}, len(models) // 2
    baseline = {seed: str(seed) for seed in range(half)}
    variant = {seed if same_seeds else seed + half: str(seed + half) for seed in range(half)}
    return difference(baseline, variant, values, resampled, CONFIDENCE).is_called


@pytest.mark.campaign
def test_of_40_pairs_of_equal_variants_at_most_two_are_called_different() -> None:
    draw = np.random.default_rng(0)
    pairs = [_models([0.3] * 6, draw) for _ in range(40)]
    for metric in ("ne", "auc"):
        for same_seeds in (False, True):
            assert sum(_is_called(models, metric, same_seeds) for models in pairs) <= 2


@pytest.mark.long
def test_a_planted_difference_of_two_thousandths_of_ne_is_found() -> None:
    draw = np.random.default_rng(1)
    worse, planted = 0.15, []
    for _ in range(6):
        models = _models([0.1] * 3 + [worse] * 3, draw, 100_000)
        planted.append(np.mean([m.metrics["ne"] for m in models[3:]]) - np.mean([m.metrics["ne"] for m in models[:3]]))
        assert _is_called(models, "ne")
    assert np.mean(planted) == pytest.approx(0.002, abs=0.0005)


def test_a_row_takes_less_than_ten_float64_while_rows_are_summed() -> None:
    draw, num_rows = np.random.default_rng(4), 1 << 16
    labels, logits = draw.integers(0, 2, num_rows).astype(np.uint8), draw.normal(size=num_rows).astype(np.float32)
    tracemalloc.start()
    try:
        summarize_rows(
            np.arange(num_rows, dtype=np.int32) // 100,
            logits,
            labels,
            num_rows // 100 + 1,
            np.ones(num_rows, np.float32),
        )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10 * 8 * num_rows


def test_linear_terms_of_auc_follow_the_auc_of_resampled_rows() -> None:
    draw = np.random.default_rng(2)
    labels = draw.integers(0, 2, 4000).astype(np.uint8)
    logits = np.round(labels * 0.8 + draw.normal(0, 1.0, 4000), 1)  # with ties
    blocks, bins = summarize_rows(np.arange(4000) // 40, logits, labels, 100, np.ones(4000))
    assert sum(each.rows for each in bins) == 4000
    assert blocks.auc_term.sum() == pytest.approx(0.0, abs=1e-12)
    weights = draw.multinomial(100, np.full(100, 0.01), size=20)
    for weight in weights:
        taken = np.repeat(np.arange(4000), weight[np.arange(4000) // 40])
        linear = auc(logits, labels) + float(weight @ blocks.auc_term)
        assert linear == pytest.approx(auc(logits[taken], labels[taken]), abs=1e-3)


def test_without_a_second_seed_the_interval_is_about_rows_alone() -> None:
    models = _models([0.3, 0.3, 0.3], np.random.default_rng(3))
    blocks: dict[str, Blocks] = {str(index): model.blocks for index, model in enumerate(models)}
    resampled = resampled_measures(blocks, dict.fromkeys(blocks, 0.5), 200)["ne"]
    values = {name: models[int(name)].metrics["ne"] for name in blocks}
    one = difference({0: "0"}, {1: "1"}, values, resampled, CONFIDENCE)
    two = difference({0: "0"}, {1: "1", 2: "2"}, values, resampled, CONFIDENCE)
    assert (one.seeds_known, two.seeds_known) == (False, True)
    assert one.value == pytest.approx(values["1"] - values["0"])
    assert not replace(one, value=1.0).is_called and replace(two, value=9.0).is_called


def test_runs_of_the_same_three_seeds_are_paired() -> None:
    rows = {name: np.zeros(9) for name in "abcdef"}
    values = dict(zip("abcdef", (0.70, 0.71, 0.72, 0.6981, 0.7079, 0.7180), strict=True))
    same = difference(dict(enumerate("abc")), dict(enumerate("def")), values, rows, CONFIDENCE)
    other = difference(dict(enumerate("abc")), dict(enumerate("def", start=3)), values, rows, CONFIDENCE)
    assert same.is_called and not other.is_called
    spread = np.std([-0.0019, -0.0021, -0.0020], ddof=1)
    assert same.half_width == pytest.approx(6.965 * spread / np.sqrt(3), rel=1e-3)


def test_rows_of_one_class_that_are_drawn_say_nothing_and_warn_of_nothing() -> None:
    """Of 100 blocks one holds the only click: every third draw has none."""
    labels = np.arange(4000) == 7
    logits = np.random.default_rng(4).normal(0, 1.0, 4000)
    blocks, _ = summarize_rows(np.arange(4000) // 40, logits, labels.astype(np.uint8), 100, np.ones(4000))
    resampled = resampled_measures({"a": blocks, "b": blocks}, {"a": 0.5, "b": 0.5}, 200)
    for measure in ("ne", "calibration", "auc"):
        drawn = resampled[measure]["a"]
        assert 20 < np.isnan(drawn).sum() < 180 and not np.isinf(drawn).any(), measure
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = difference({0: "a"}, {0: "b"}, {"a": 0.5, "b": 0.5}, resampled[measure], CONFIDENCE)
        assert describe(measure, found) == "the same up to rounding"
