"""What a predicted step means, as text and as pictures: rates, epochs, prices, more ranks, other settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.cli.plan import with_sizes
from pipeline.extras.pages.step_charts import gantt, step_sections
from pipeline.extras.step_time.clocks import Span
from pipeline.extras.step_time.forecast import (
    PlanForecast,
    WhatIf,
    describe_forecast,
    describe_scaling,
    describe_what_ifs,
    where_it_stops,
)
from pipeline.extras.step_time.overheads import READER, SAVES, Saves, overheads_of
from tests.extras.step_time.step_jobs import SPEEDS as MEASURED
from tests.support.messages import mentions

EIGHT = PlanForecast(
    world_size=8,
    batch_size=1000,
    step_ms=10.0,
    samples_per_s=800_000.0,
    parts={"layers forward": 4.0, "rows exchange": 6.0},
    spans=[Span("layers forward", "compute", 0.0, 4.0), Span("rows exchange", "communication", 4.0, 6.0)],
    source="data sheet of some_gpu",
    exposed_comms_ms=6.0,
    fullest_bytes=2.0**30,
    room_bytes=2.0**31,
    num_samples=80_000_000,
    price_per_hour=3.6,
)


def ranks(count: int, samples_per_s: float) -> PlanForecast:
    return replace(EIGHT, world_size=count, samples_per_s=samples_per_s, batch_size=8000 // count)


def test_an_epoch_takes_its_samples_and_costs_its_rank_hours() -> None:
    text = "\n".join(describe_forecast(EIGHT))
    # 80 million at 800,000 a second are 100 s; 8 ranks at 3.6 an hour cost 0.8.
    assert mentions(text, "10 ms, 800,000 samples/s 80,000,000 1.67 min 0.80 60 % some_gpu")
    without = "\n".join(describe_forecast(replace(EIGHT, num_samples=None, price_per_hour=None)))
    assert "epoch" not in without and "price" not in without


def test_more_ranks_stop_to_pay_where_twice_as_many_give_less_than_half_more() -> None:
    rows = [ranks(8, 1e6), ranks(16, 1.9e6), ranks(32, 2.5e6), ranks(64, 2.6e6)]
    assert mentions(where_it_stops(rows), "at 16: 32 1.32 rows exchange 60 %")
    assert mentions(where_it_stops(rows[:2]), "16 pays")
    table = describe_scaling(rows)
    assert len(table) == 6 and mentions(table[2], "16 500 1.90x 95 % rows exchange")


def test_levers_stand_by_their_gain() -> None:
    what_ifs = [
        WhatIf("comms=fp16", ranks(8, 900_000.0)),
        WhatIf("trainer.precision=bf16", ranks(8, 1_200_000.0)),
        WhatIf("planner=torchrec", None, "no plan"),
    ]
    _, first, second, last = describe_what_ifs(EIGHT, what_ifs)
    assert mentions(first, "trainer.precision=bf16 +50.0 %") and mentions(second, "comms=fp16 +12.5 %")
    assert mentions(last, "planner=torchrec no plan")


def test_the_page_has_a_bar_for_each_span_and_a_row_for_each_clock_that_works() -> None:
    drawn = gantt(EIGHT)
    assert drawn.count("<rect") == 2 and ">compute<" in drawn and ">communication<" in drawn and ">host<" not in drawn
    assert mentions(drawn, "rows exchange: 6 ms from 4 ms")
    sections = "".join(step_sections(EIGHT, [EIGHT, ranks(16, 1.2e6)]))
    assert "samples/s by ranks" in sections
    assert "samples/s by ranks" not in "".join(step_sections(EIGHT, [EIGHT]))


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("world_size=[16,8,64]", ["world_size=8", "scale_to=[16,64]"]),
        ("world_size=8", ["world_size=8"]),
        ("tables.default.sharding.sharding_types=[row_wise]", ["tables.default.sharding.sharding_types=[row_wise]"]),
    ],
    ids=["sizes", "size", "other"],
)
def test_several_world_sizes_are_a_plan_for_the_first_and_predictions_for_the_others(
    word: str, found: list[str]
) -> None:
    assert with_sizes([word]) == found


SPEEDS = replace(MEASURED, write_gb_per_s=1.0, copy_gb_per_s=8.0)
HOURLY = Saves(every_steps=0, every_minutes=60.0, asynchronous=False, rank_bytes=18e9, disk_bytes=36e9)


def test_a_reader_with_a_core_is_waited_for_only_where_it_is_slower_than_the_step() -> None:
    fast, slow = 2.0, 20.0  # ms of decoding a batch, next to a step of 10
    assert overheads_of(10.0, fast, SPEEDS, HOURLY, reader_has_core=True).waits_ms[READER] == 0.0
    assert overheads_of(10.0, slow, SPEEDS, HOURLY, reader_has_core=True).waits_ms[READER] == 10.0
    assert overheads_of(10.0, fast, SPEEDS, HOURLY, reader_has_core=False).waits_ms[READER] == 2.0


def test_a_save_is_spread_over_the_steps_between_two() -> None:
    # 36 GB at 1 GB/s are 36 s in each hour of training: a hundredth of the step.
    found = overheads_of(10.0, 0.0, SPEEDS, HOURLY, reader_has_core=True)
    assert found.waits_ms[SAVES] == pytest.approx(0.1) and mentions(found.lines[-1], "3600 36 0.99 %")
    by_steps = replace(HOURLY, every_steps=1000)  # the sooner of the two: every 10 s
    assert overheads_of(10.0, 0.0, SPEEDS, by_steps, reader_has_core=True).waits_ms[SAVES] == pytest.approx(36.0)


def test_an_asynchronous_save_waits_for_its_copy_and_for_the_save_before_it() -> None:
    behind = replace(HOURLY, asynchronous=True)
    found = overheads_of(10.0, 0.0, SPEEDS, behind, reader_has_core=True)
    assert found.waits_ms[SAVES] == pytest.approx(10.0 * 18 / 4 / 3600)
    often = replace(behind, every_steps=1000)  # writing takes 36 s, training 10 s meanwhile
    assert overheads_of(10.0, 0.0, SPEEDS, often, reader_has_core=True).waits_ms[SAVES] == pytest.approx(
        10.0 * (4.5 + 26) / 10
    )
