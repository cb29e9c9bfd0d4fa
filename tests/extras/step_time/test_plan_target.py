"""The smallest hardware for a rate: what is tried, and what is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.config.jobs.train import PlanJob
from pipeline.config.planner import HardwareConfig, TargetConfig
from pipeline.extras.step_time.forecast import PlanForecast
from pipeline.extras.step_time.plan_target import (
    Tried,
    cheapest,
    describe_target,
    find_target,
    sizes_to_try,
    smallest,
    target_of,
)
from pipeline.runtime.errors import ConfigError
from tests.support.messages import mentions, names

FAST = HardwareConfig(name="fast", ranks_per_host=8, price_per_hour=4.0)
SLOW = HardwareConfig(name="slow", ranks_per_host=8, price_per_hour=1.0)
RATES = {"fast": 1000.0, "slow": 400.0}  # of one rank


def job(**target: object) -> PlanJob:
    from pipeline.cli.command_line import load_config

    words = [
        "experiment=quickstart",
        "hardware=h100_80gb",
        "trainer.global_batch_size=4096",
        "data.reader.num_streams=4096",
    ]
    made = load_config(PlanJob, words)
    return replace(made, target=TargetConfig(**target))


def predict(other: PlanJob) -> PlanForecast:
    """In proportion to the ranks up to 64; one rank of `slow` is too small for the tables."""
    if other.hardware.name == "slow" and other.world_size < 2:
        raise ConfigError("no plan holds the tables")
    rate = RATES[other.hardware.name] * min(other.world_size, 64)
    return PlanForecast(
        world_size=other.world_size,
        batch_size=1,
        step_ms=1.0,
        samples_per_s=rate,
        parts={"layers forward": 1.0},
        spans=[],
        source="test",
        exposed_comms_ms=0.0,
        fullest_bytes=1.0,
        room_bytes=2.0,
        price_per_hour=other.hardware.price_per_hour,
    )


def test_an_epoch_a_day_is_its_samples_by_the_seconds_of_a_day() -> None:
    target = target_of(job(epochs_per_day=2.0), 43_200_000)
    assert target.samples_per_s == 1000.0 and target.epochs_per_day(500.0) == 1.0
    assert target_of(job(epochs_per_day=1.0, num_samples=86_400), None).samples_per_s == 1.0
    with pytest.raises(ConfigError, match=names("target.num_samples target.epochs_per_day")):
        target_of(job(epochs_per_day=1.0), None)


def test_the_fewest_ranks_are_found_and_the_cheapest_beside_them() -> None:
    wanted = job(samples_per_s=3000.0)
    tried = find_target(wanted, target_of(wanted, None), {"fast": FAST, "slow": SLOW}, predict)
    assert [(each.hardware, each.world_size) for each in tried] == [
        *[("fast", size) for size in (1, 2, 4)],
        *[("slow", size) for size in (1, 2, 4, 8)],
    ]
    assert tried[3].forecast is None and "no plan" in tried[3].note
    small, cheap = smallest(tried), cheapest(tried)
    assert small and (small.hardware, small.world_size) == ("fast", 4)
    assert cheap and (cheap.hardware, cheap.world_size) == ("slow", 8)
    lines = describe_target(target_of(wanted, 1_000_000), tried)
    assert mentions(lines[-2], "smallest 4 fast") and mentions(lines[-1], "cheapest 8 slow")


def test_sizes_between_the_last_that_fails_and_the_first_that_reaches_are_tried_by_halves() -> None:
    assert sizes_to_try(96, 960, 8, 96) == [1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 96]
    assert sizes_to_try(96, 8, 8, 96) == [1, 2, 4, 8]
    wanted = job(samples_per_s=5500.0)
    reader = replace(wanted.data.reader, num_streams=96)
    wanted = replace(
        wanted,
        trainer=replace(wanted.trainer, global_batch_size=96),
        data=replace(wanted.data, reader=reader),
    )
    tried = find_target(wanted, target_of(wanted, None), {"fast": FAST}, predict)
    assert [each.world_size for each in tried] == [1, 2, 4, 8, 6]
    assert (found := smallest(tried)) is not None and found.world_size == 6


def test_where_more_ranks_give_nothing_more_none_are_tried() -> None:
    wanted = job(samples_per_s=1e9)
    tried = find_target(wanted, target_of(wanted, None), {"fast": FAST}, predict)
    assert [each.world_size for each in tried] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert smallest(tried) is None
    assert mentions(describe_target(target_of(wanted, None), tried)[-1], "64 fast")


def test_two_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match=names("target.epochs_per_day target.samples_per_s")):
        TargetConfig(epochs_per_day=1.0, samples_per_s=5.0)
    assert not TargetConfig().is_set and Tried("a", 1, None, "none").reaches is False
