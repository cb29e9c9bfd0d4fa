"""The gate promotes what is as good, and says with numbers why it does not; data are held to those of earlier windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.config.retraining import DataChecksConfig, GateConfig
from pipeline.retraining.challenge import log_findings
from pipeline.retraining.data_checks import check_data
from pipeline.retraining.gate import Scores, judge, upper_bound_of_ratio
from pipeline.retraining.row_sketch import SKETCH_SIZE, RowSketch
from pipeline.retraining.statistics import WindowStatistics, ks_distance, total_variation
from pipeline.runtime.errors import ConfigError
from tests.support.messages import mentions, names

ROWS = 40_000


def _truth() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    logits = random.normal(0, 1.5, ROWS)
    return logits, (random.random(ROWS) < 1 / (1 + np.exp(-logits))).astype(np.float32)


def _scores(noise: float = 0.0, shift: float = 0.0, seed: int = 1) -> Scores:
    logits, labels = _truth()
    noisy = logits + noise * np.random.default_rng(seed).normal(0, 1, ROWS) + shift
    return Scores(noisy.astype(np.float32), labels, {"slot": np.arange(ROWS) % 4})


@pytest.mark.long
def test_the_same_model_is_promoted_and_a_worse_one_is_not() -> None:
    champion = _scores(noise=0.3)
    assert judge(champion, champion, GateConfig()).passed
    assert judge(_scores(noise=0.1, seed=2), champion, GateConfig()).passed
    verdict = judge(_scores(noise=0.6, seed=2), champion, GateConfig())
    assert [finding.name for finding in verdict.findings if not finding.passed] == ["ne"]
    assert mentions(verdict.reasons[0], "95") and mentions(verdict.reasons[0], "1.0010")


def test_the_line_of_a_gate_says_how_each_check_went_and_on_which_side_its_limit_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It said rows 6e+04 (within 1000) and calibration 0.975 (within 1.03)."""
    findings = judge(_scores(shift=2.0), _scores(), GateConfig(min_rows=1000)).findings
    with caplog.at_level("INFO"):
        log_findings("gate of w1", findings)
    (line,) = [record.getMessage() for record in caplog.records if "gate of w1" in record.getMessage()]
    assert mentions(line, "rows 40,000 (passed, at least 1,000) calibration (FAILED, at most 1.03)")
    assert "within" not in line and "e+0" not in line


def test_scores_that_are_off_or_not_finite_are_refused() -> None:
    champion = _scores(noise=0.3)
    assert "calibration" in judge(_scores(shift=0.2), champion, GateConfig()).reasons[0]
    broken = _scores()
    broken.logits[7] = np.nan
    assert judge(broken, champion, GateConfig()).reasons == ["1 of 40,000 scores are not finite"]


@pytest.mark.long
def test_a_slice_may_not_get_worse_though_the_whole_gets_better() -> None:
    champion, better = _scores(noise=0.6), _scores(noise=0.1, seed=2)
    worse = _scores(noise=1.5, seed=3)
    mixed = Scores(np.where(better.slices["slot"] == 3, worse.logits, better.logits), better.labels, better.slices)
    config = GateConfig(slices={"slot": 0.02}, calibration_min=0.5, calibration_max=2.0, ne_tolerance=1.0)
    assert judge(better, champion, config).passed
    (reason,) = judge(mixed, champion, config).reasons
    assert mentions(reason, "NE 10,000 1.")


def test_the_first_version_is_held_to_absolute_limits() -> None:
    assert judge(_scores(noise=0.3), None, GateConfig()).passed
    constant = Scores(np.zeros(ROWS, np.float32), _scores().labels)
    assert mentions(judge(constant, None, GateConfig()).reasons[0], "gate.max_ne=1")


@pytest.mark.campaign
def test_the_upper_bound_covers_the_true_ratio_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        theirs = random.exponential(1.0, 2000)
        ours = 1.02 * theirs + random.normal(0, 0.2, 2000)
        covered += upper_bound_of_ratio(ours, theirs, 0.95, 400, seed) >= 1.02
    assert 52 <= covered <= 60  # 57 of 60 expected


def test_distances_are_0_for_the_same_and_1_for_nothing_in_common() -> None:
    quantiles = np.linspace(0, 1, 64).tolist()
    assert ks_distance(quantiles, quantiles) == 0.0
    assert ks_distance(quantiles, [value + 5 for value in quantiles]) == 1.0
    assert total_variation([1, 1, 0], [5, 5, 0]) == 0.0
    assert total_variation([1, 1, 0], [0, 0, 7]) == total_variation([3, 0], [0, 0]) == 1.0


def test_a_sketch_finds_what_share_of_rows_was_there_before() -> None:
    random = np.random.default_rng(0)
    old, new = (np.unique(random.integers(0, 2**63, 50_000, dtype=np.uint64)) for _ in range(2))

    def sketch(hashes: np.ndarray) -> RowSketch:
        return RowSketch.of(RowSketch(np.sort(hashes)[:SKETCH_SIZE]).text)

    assert sketch(old).share_in(sketch(old)) == 1.0
    assert sketch(new).share_in(sketch(old)) == 0.0
    half = np.concatenate([old[::2], new[::2]])
    assert sketch(half).share_in(sketch(old)) == pytest.approx(0.5, abs=0.08)


USUAL = WindowStatistics(1000, 0.25, {"a": 0.1}, {"a": 0.02}, champion_ne=0.8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rows": 500}, "rows 500 differs by -50.0% from the median 1,000; at most 30% are allowed"),
        ({"label_rate": 0.4}, "label rate 0.4000 differs by +60.0% from the median 0.2500"),
        ({"empty_share": {"a": 0.9}}, "feature a: rows without a known value 0.900, median 0.100"),
        ({"distance": {"a": 0.6}}, "feature a: distance from the window before 0.600, median 0.020"),
        ({"repeated_share": 0.5, "repeated_of": "w1"}, "50.0% of the rows are also in window w1; the median is 0.0%"),
        ({"champion_ne": 0.9}, "the champion's NE on these rows is 0.9000, +12.5% from the median 0.8000"),
        ({"outside_share": 0.2}, "20.0% of the rows have a timestamp outside the window"),
        ({"label_rate": 0.0}, "nothing can be learned from one kind of label"),
    ],
)
def test_a_window_unlike_those_before_it_is_refused_with_the_figure(change: dict[str, object], told: str) -> None:
    history = [USUAL, USUAL, USUAL]
    assert all(finding.passed for finding in check_data(USUAL, history, DataChecksConfig()))
    findings = check_data(replace(USUAL, **change), history, DataChecksConfig())
    reasons = [finding.text for finding in findings if not finding.passed]
    assert any(told in reason for reason in reasons), reasons


def test_a_champion_that_has_missed_windows_is_allowed_to_know_less() -> None:
    unknown = replace(USUAL, empty_share={"a": 0.35})
    assert not all(one.passed for one in check_data(unknown, [USUAL] * 3, DataChecksConfig()))
    assert all(one.passed for one in check_data(replace(unknown, age=2), [USUAL] * 3, DataChecksConfig()))


def test_windows_are_compared_with_none_before_the_first_that_checks_name() -> None:
    """What has changed for good is no fault of all windows to come."""
    changed = replace(USUAL, rows=3000, empty_share={"a": 0.9}, distance={"a": 0.9}, champion_ne=1.2)
    begins = [f"2026-11-{day:02d}T00:00:00+00:00" for day in range(9, 0, -1)]
    history = [replace(changed if day < 2 else USUAL, begin=begin) for day, begin in enumerate(begins)]
    assert not all(one.passed for one in check_data(changed, history, DataChecksConfig()))
    assert all(one.passed for one in check_data(changed, history, DataChecksConfig(first="2026-11-08")))
    copy = replace(changed, repeated_share=1.0, repeated_of="w1")
    assert not all(one.passed for one in check_data(copy, history[2:], DataChecksConfig(first="2026-11-08")))
    with pytest.raises(ConfigError, match=names("checks.trailing=1 checks.min_history=2")):
        DataChecksConfig(trailing=1)
