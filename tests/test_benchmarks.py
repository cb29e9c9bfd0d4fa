"""What the benchmarks compute from what they measure."""

from __future__ import annotations

import pytest

from benchmarks.comms import promised
from benchmarks.startup import show, timed
from benchmarks.startup_rank import STAGES


def test_a_stage_counts_from_the_end_of_the_one_before() -> None:
    marks = [(stage, 100.0 + 2 * number, 0.5 * number) for number, stage in enumerate(STAGES, start=1)]
    found = timed(marks, 100.0, 2, "warm")
    assert set(found.clock.values()) == {2.0}
    assert set(found.cpu.values()) == {0.5}
    assert found.total == pytest.approx(2.0 * len(STAGES))
    assert f"{found.total:.2f} s" in show([found]).splitlines()[-1]


def test_what_a_precision_promises_depends_on_the_collective() -> None:
    assert promised("int8:fp16", "table_wise") == (3.2, 2.0)
    assert promised("int8:bf16", "row_wise") == (2.0, 2.0)
    assert promised("fp32:fp32", "column_wise") == (1.0, 1.0)
