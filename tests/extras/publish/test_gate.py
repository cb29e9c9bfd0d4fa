"""A delta is held against what serves and against the deltas before it; cadences say when one is due."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipeline.config.jobs.train import Cadence, DeltaGateConfig, PublishingConfig, read_cadence
from pipeline.extras.publish.gate import problems_of
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names

GOOD = {"ne": 0.8, "ne_before": 0.8, "norm_ratio": 1.0, "rows_fraction": 0.01, "not_finite": 0, "progressive_ne": 0.8}


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"not_finite": 1}, "finite"),
        ({"ne": 0.82}, "max_ne_increase"),
        ({"ne": math.nan}, "max_ne_increase"),
        ({"norm_ratio": 11.0}, "max_norm_ratio"),
        ({"norm_ratio": math.nan}, "max_norm_ratio"),
        ({"rows_fraction": 0.06}, "max_rows_rise"),
        ({"norm_ratio": 3.1}, "max_norm_rise"),
        ({"norm_ratio": 0.3}, "max_norm_rise"),
        ({"progressive_ne": 0.89}, "max_progressive_ne_rise"),
        ({"progressive_ne": math.nan}, "max_progressive_ne_rise"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}-{v}" for k, v in value.items()),
)
def test_a_delta_unlike_those_before_it_has_a_problem(changed: dict[str, float], key: str) -> None:
    gate, history = DeltaGateConfig(), [GOOD] * 5
    assert problems_of(gate, GOOD, history) == []
    found = problems_of(gate, {**GOOD, **changed}, history)
    assert found and key in "; ".join(found)


def test_trailing_bounds_wait_for_a_history_and_follow_the_newest() -> None:
    gate = DeltaGateConfig(trailing=5)
    many = {**GOOD, "rows_fraction": 0.5}
    assert problems_of(gate, many, [GOOD] * 4) == []
    assert problems_of(gate, many, [GOOD] * 5) != []
    assert problems_of(gate, many, [GOOD] * 9 + [many] * 5) == []
    assert problems_of(replace(gate, max_rows_rise=None), many, [GOOD] * 5) == []
    unlabelled = {key: value for key, value in GOOD.items() if key != "progressive_ne"}
    assert problems_of(gate, unlabelled, [unlabelled] * 5) == problems_of(gate, GOOD, [unlabelled] * 5) == []


@pytest.mark.parametrize(
    ("text", "cadence"),
    [
        ("every_5_minutes", Cadence(seconds=300.0)),
        ("every_minute", Cadence(seconds=60.0)),
        ("every_0.5_seconds", Cadence(seconds=0.5)),
        ("every_2_hours", Cadence(seconds=7200.0)),
        ("every_200_steps", Cadence(steps=200)),
    ],
)
def test_cadences(text: str, cadence: Cadence) -> None:
    assert read_cadence(text, "publishing.when") == cadence == PublishingConfig(when=text).cadence


@pytest.mark.parametrize("text", ["5_minutes", "every_0_steps", "every_1.5_steps", "every_day", "every_5_minutes_", ""])
def test_what_is_no_cadence_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=names("publishing.when")):
        PublishingConfig(when=text)
