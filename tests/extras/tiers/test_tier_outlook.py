"""The predicted stall of tables in tiers follows from forecasts, the step and the SSD, and one that is too long is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.config.jobs.train import TrainJob
from pipeline.config.planner import HardwareConfig, PlannerConfig
from pipeline.config.training import ShardingConfig
from pipeline.extras.tiers import outlook as module
from pipeline.extras.tiers.forecast import TierForecast
from pipeline.extras.tiers.outlook import data_sheet, tier_outlook
from pipeline.extras.tiers.probe import SsdSpeed
from pipeline.extras.tiers.rates import tier_folder, tier_rates
from pipeline.runtime.errors import PlanError, TrainingError
from pipeline.sharding.table_storage import TierStats
from pipeline.training.hooks.throughput import describe_tiers
from tests.planner.plans import drawn_plan

SPEED = SsdSpeed(50_000.0, 25_000.0)


def _job(**planner: float) -> TrainJob:
    return TrainJob(name="t", run_dir="runs/t", planner=PlannerConfig(**planner))


def test_the_stall_is_of_the_rank_with_most_rows_and_a_long_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", lambda folder, record, rows: SPEED)
    plan, _ = drawn_plan(4, 2)
    assert tier_outlook(_job(), plan, 10.0) == []
    first, *others = plan.tables
    tiered = replace(first, tiers=TierForecast(10, 0.9, 1000.0 * len(first.ranks)))
    plan = replace(plan, tables=[tiered, *others])
    (line,) = tier_outlook(_job(), plan, step_ms=15.0)
    assert (
        "1,000 rows per step are loaded and evicted, 60 ms of the SSD" in line and "predicted tier stall 75 %" in line
    )
    (line,) = tier_outlook(_job(), plan, step_ms=80.0)
    assert "predicted tier stall 0 %" in line
    with pytest.raises(PlanError, match=r"stall 75 %; planner.most_tier_stall_percent=50 allows less: raise tables"):
        tier_outlook(_job(most_tier_stall_percent=50.0), plan, step_ms=15.0)


def test_a_data_sheet_goes_before_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure", lambda folder, record, rows: SPEED)
    assert (
        data_sheet(HardwareConfig(ssd_gb_per_s=3.0)) is None and data_sheet(HardwareConfig(ssd_latency_us=80)) is None
    )
    by_latency = data_sheet(HardwareConfig(ssd_gb_per_s=3.0, ssd_latency_us=80))
    assert by_latency == SsdSpeed(200_000.0, 1_600_000.0)
    by_bandwidth = data_sheet(HardwareConfig(ssd_gb_per_s=0.4096, ssd_latency_us=80))
    assert by_bandwidth == SsdSpeed(100_000.0, 800_000.0)
    plan, _ = drawn_plan(4, 2)
    first, *others = plan.tables
    plan = replace(plan, tables=[replace(first, tiers=TierForecast(10, 0.9, 1000.0 * len(first.ranks))), *others])
    job = replace(_job(), hardware=HardwareConfig(ssd_gb_per_s=0.4096, ssd_latency_us=80))
    assert "11.2 ms of the SSD (100,000 loads and 800,000 stores" in tier_outlook(job, plan, 60.0)[0]


def test_rows_do_not_lie_in_an_object_store() -> None:
    job = replace(_job(), sharding=ShardingConfig(tier_folder="s3://bucket/rows"))
    with pytest.raises(
        TrainingError, match=r"tables.a.tiers would keep rows in s3://bucket/rows.*sharding.tier_folder"
    ):
        tier_folder(job, "a")


def test_rates_are_shares_of_the_time_and_of_what_was_looked_up() -> None:
    stats = TierStats(
        lookups=1000, missed_lookups=100, rows=400, missed_rows=100, read_bytes=4_000_000, stall_seconds=0.5
    )
    rates = tier_rates(stats, seconds=2.0, num_steps=4)
    assert (rates["tier_stall_percent"], rates["tier_hit_percent"], rates["tier_row_hit_percent"]) == (25.0, 90.0, 75.0)
    assert describe_tiers(rates).startswith("tier stall 25.0 %  hits 90.0 %  SSD 1.0 + 0.0 MB a step")
    assert describe_tiers({}) == ""
