"""Steps of many ranks, each with clocks of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.many_ranks import EVEN, Unevenness, simulate
from benchmarks.published_steps import read_runs
from benchmarks.row_bands import even, power_law, touched
from pipeline.extras.step_time.plan_forecast import step_request
from pipeline.extras.step_time.prediction import SheetLayers
from pipeline.planner.plan_record import RankLoad
from tests.extras.step_time.step_jobs import SmallStep, planned
from tests.planner.problems import preset

JOB = SmallStep()


@pytest.fixture(scope="module")
def eight() -> tuple[SheetLayers, list[RankLoad]]:
    resolved, request = replace(JOB, batch=4096).request(8, preset("h100_80gb", issue_us=0.0))
    record = planned(resolved, request)
    return SheetLayers(step_request(resolved, request, record, 1)), record.ranks


def test_ranks_that_are_all_alike_take_what_one_is_predicted_to_take(eight: tuple[SheetLayers, list[RankLoad]]) -> None:
    layers, loads = eight
    slowest = replace(max(loads, key=lambda load: load.cost_ms))
    alike = [replace(slowest, rank=rank) for rank in range(8)]
    assert simulate(layers, alike, EVEN, steps=3) == pytest.approx(layers.step(alike).step_ms, rel=1e-6)


def test_work_that_varies_and_ranks_that_are_slow_lengthen_the_step(eight: tuple[SheetLayers, list[RankLoad]]) -> None:
    layers, loads = eight
    even = simulate(layers, loads, EVEN, steps=20)
    varied = simulate(layers, loads, Unevenness(spread=0.1, straggles=0.0), steps=20)
    slow = simulate(layers, loads, Unevenness(0.0, 0.0, slow_ranks=1.0, slower_by=0.5), steps=20)
    assert even < varied < 1.5 * even
    assert even < slow < 1.5 * even  # collectives are no slower
    twice = simulate(layers, loads, Unevenness(0.0, 1.0, times_as_long=2.0), steps=20)
    assert twice - even == pytest.approx(2 * (slow - even), rel=0.01)


def test_a_reader_slower_than_the_step_sets_the_pace(eight: tuple[SheetLayers, list[RankLoad]]) -> None:
    layers, loads = eight
    even = simulate(layers, loads, EVEN, steps=20)
    assert simulate(layers, loads, EVEN, read_ms=10 * even, steps=20) == pytest.approx(10 * even)
    assert simulate(layers, loads, EVEN, read_ms=0.5 * even, steps=20) == pytest.approx(even)


def test_every_published_run_says_its_rate_its_source_and_its_job() -> None:
    runs = read_runs()
    assert len({run.name for run in runs}) == len(runs) >= 10
    for run in runs:
        assert run.samples_per_s > 0 and run.source.startswith("https://")
        assert not run.rows or len(run.rows) == 26
        assert any(word.startswith("world_size=") for word in run.words)


@pytest.mark.parametrize("skew", [1.0, 3.0])
def test_expected_distinct_rows_are_those_of_drawn_batches(skew: float) -> None:
    rows, ids, generator = 5000, 4000, np.random.default_rng(0)
    (found,) = touched([power_law(rows, skew)], [ids], [64], 0)
    drawn = [len(np.unique((generator.random(ids) ** skew * rows).astype(int))) for _ in range(5)]
    assert found.distinct == pytest.approx(np.mean(drawn), rel=0.03)
    assert found.missed_ids == pytest.approx(ids)


def test_a_cache_keeps_the_rows_that_are_looked_up_most_of_all_tables() -> None:
    hot, cold = power_law(1000, 4.0), even(1000)
    alone = [touched([bands], [1000], [64], 100 * 64)[0] for bands in (hot, cold)]
    assert alone[0].missed_ids < 500 < alone[1].missed_ids == pytest.approx(900)
    (first, second) = touched([hot, cold], [1000, 1000], [64, 64], 100 * 64)
    assert first.missed_ids == pytest.approx(alone[0].missed_ids, rel=0.05) and second.missed_ids == 1000
    roomy = touched([hot, cold], [1000, 1000], [64, 64], 2000 * 64)
    assert [each.missed_ids for each in roomy] == [0.0, 0.0]
