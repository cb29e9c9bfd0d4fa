"""The errors of a slice's numbers are those of a bootstrap, and a number is cut into parts of equal weight."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.quality import probabilities
from pipeline.extras.runs.slices import _tenths, measure


def test_standard_errors_are_those_of_a_bootstrap_over_weighted_rows() -> None:
    draw = np.random.default_rng(0)
    logits = np.round(draw.normal(-1, 1.5, 1500), 2)
    labels = (draw.random(1500) < probabilities(logits - 0.3)).astype(np.float64)
    weights = draw.integers(1, 5, 1500).astype(np.float64)
    found = measure(logits, labels, weights)
    samples = [measure(logits[rows], labels[rows], weights[rows]) for rows in draw.integers(0, 1500, (400, 1500))]
    for number, (value, error) in enumerate(found):
        values = [sample[number][0] for sample in samples]
        assert value == pytest.approx(np.mean(values), abs=2 * np.std(values) / 20 + 1e-3)
        assert error == pytest.approx(np.std(values), rel=0.12)


def test_rows_of_one_class_have_no_ne_and_auc() -> None:
    logits, weights = np.array([0.0, 1.0]), np.ones(2)
    assert measure(logits, np.zeros(2), weights) == ((None, None),) * 3
    calibration, *others = measure(logits, np.ones(2), weights)
    assert calibration[0] == pytest.approx(probabilities(logits).mean()) and others == [(None, None)] * 2


def test_a_number_is_cut_by_weight_and_equal_values_stay_together() -> None:
    values, weights = np.array([5.0, 1.0, 1.0, 9.0]), np.array([1.0, 4.0, 4.0, 1.0])
    assert _tenths(values, weights).tolist() == [8, 4, 4, 9]
    repeated = np.repeat(values, weights.astype(int))
    assert _tenths(repeated, np.ones(10)).tolist() == np.repeat([8, 4, 4, 9], weights.astype(int)).tolist()
