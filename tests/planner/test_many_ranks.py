"""Steps of many ranks, each with clocks of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published_steps import read_runs
from pipeline.planner.constraints import TableOptimizer
from pipeline.planner.hardware import resolve_hardware
from pipeline.planner.planner import make_plan
from pipeline.planner.record import RankLoad
from pipeline.planner.request import PlanRequest
from pipeline.planner.step_time.many_ranks import EVEN, Unevenness, simulate
from pipeline.planner.step_time.predict import SheetLayers
from pipeline.sharding.torchrec.sharding import make_sharders
from pipeline.training.assembly import build_task
from pipeline.training.predicted_step import step_request
from tests.planner.problems import preset
from tests.planner.test_step_time import JOB


@pytest.fixture(scope="module")
def eight() -> tuple[SheetLayers, list[RankLoad]]:
    resolved = replace(JOB, batch=4096).resolve(8, preset("h100_80gb", issue_us=0.0))
    hardware = resolve_hardware(resolved.job.hardware, 8)
    request = PlanRequest(
        resolved.plain_tables, build_task(resolved, "cuda"), make_sharders(resolved.job.comms), hardware,
        TableOptimizer(JOB.sparse, 0.0), JOB.batch,
    )  # fmt: skip
    record = make_plan(replace(resolved.job.planner, kind="torchrec"), request)
    return SheetLayers(step_request(resolved, record, hardware, 1)), record.ranks


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
