"""A search's seconds are CPU seconds of its thread: other work on the machine does not make its plan worse."""

from __future__ import annotations

import pytest

from pipeline.planner.search.incumbent import MAX_WAITING, WorkClock


class Hands:
    """What the two clocks show."""

    cpu = wall = 100.0


def test_waiting_for_a_busy_machine_is_not_counted_up_to_an_end() -> None:
    hands = Hands()
    clock = WorkClock(10.0, lambda: hands.cpu, lambda: hands.wall)
    assert (clock.busy, clock.remaining_s, clock.has_used(0.0)) == (1.0, 10.0, False)
    hands.cpu, hands.wall = 102.0, 106.0  # a third of the machine
    assert clock.busy == pytest.approx(3.0)
    assert not clock.has_used(0.25) and clock.has_used(0.19)
    assert clock.remaining_s == pytest.approx(24.0)  # 8 s of CPU, which take three times as long here
    hands.cpu, hands.wall = 110.1, 130.0
    assert clock.has_used()
    hands.cpu, hands.wall = 101.0, 100.0 + 10.0 * MAX_WAITING + 0.1
    assert clock.has_used() and clock.remaining_s < 0  # a search must end, however busy the machine is


def test_a_quiet_machine_has_one_second_of_the_clock_for_each_of_cpu() -> None:
    hands = Hands()
    clock = WorkClock(10.0, lambda: hands.cpu, lambda: hands.wall)
    hands.cpu, hands.wall = 104.0, 104.0
    assert (clock.wall_s, clock.busy, clock.remaining_s) == (4.0, 1.0, 6.0)
