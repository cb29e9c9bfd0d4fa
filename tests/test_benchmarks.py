"""What the benchmarks compute from what they measure."""

from __future__ import annotations

import pytest

from benchmarks.comms import promised
from benchmarks.compression import Row, report
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


def test_compressed_tables_are_compared_to_the_hash_of_their_own_seed() -> None:
    rows = [
        Row("full", 1, seed, 10, 0, 2**20, auc=0.80, ne=0.7, cpu_s=2.0) for seed in (0, 1)
    ] + [
        Row(kind, 4, seed, 10, 2**18, 2**20, auc=auc + seed / 100, ne=0.7, cpu_s=1.0)
        for kind, auc in (("hash", 0.75), ("tensor_train", 0.76)) for seed in (0, 1)
    ]  # fmt: skip
    text = report([*rows, Row("mixed_dimension", 4, 0, 10, problem="cannot")])
    assert "| tensor_train | 0.25 | 0.7650 | -0.0350 | +0.0100 (+0.0100 .. +0.0100) | 0.7000 | x 0.50 |" in text
    assert "| mixed_dimension | cannot be so small |" in text
    assert "quotient_remainder" not in text
