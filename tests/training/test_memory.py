from __future__ import annotations

import logging
import mmap
from dataclasses import replace

import pytest

from pipeline import devices
from pipeline.devices.process_group import init_distributed
from pipeline.training.memory_watch import MemoryWatch, describe_memory
from tests.planner.plans import drawn_plan
from tests.support.ranks import RankPool

MIB = 1 << 20


def _measure(rank: int) -> tuple[int, int]:
    watch = MemoryWatch(init_distributed())
    before = watch.peak_bytes()
    with mmap.mmap(-1, (64 + 64 * rank) * MIB) as held:  # a heap may hold pages that were resident before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        after = watch.peak_bytes()
    return before, after


def test_what_a_rank_takes_after_the_watch_began_is_told(ranks: RankPool) -> None:
    found = ranks.run(2, _measure)
    for rank, (before, after) in enumerate(found):
        taken = (64 + 64 * rank) * MIB
        # The kernel counts resident pages in batches.
        assert before < 16 * MIB and taken - 4 * MIB < after < taken + 32 * MIB, found


def _report(rank: int) -> list[str]:
    context = init_distributed()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("pipeline.training")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    MemoryWatch(context).report(replace(drawn_plan(4, 2, device="cpu")[0], dense_bytes=3 * MIB))
    logger.removeHandler(handler)
    return lines


def test_all_ranks_predicted_and_measured_memory_stand_side_by_side(ranks: RankPool) -> None:
    lines = ranks.run(2, _report)[0]
    assert len(lines) == 3 and "growth of the resident set" in lines[0]
    assert all(f"rank {rank}: predicted" in lines[1 + rank] and "measured" in lines[1 + rank] for rank in range(2))


@pytest.mark.parametrize(("device", "how"), [("cuda", "max_memory_allocated"), ("cpu", "growth of the resident set")])
def test_predictions_add_the_dense_part_to_the_tables(device: str, how: str) -> None:
    plan, _ = drawn_plan(4, 2, device=device)
    load = replace(plan.ranks[0], hbm_bytes=100 * MIB if device == "cuda" else 0, ddr_bytes=100 * MIB)
    plan = replace(plan, ranks=[load, plan.ranks[1]], dense_bytes=28 * MIB)
    text = describe_memory(plan, [200 * MIB, 7 * MIB], devices.named(device).memory_figure)
    assert how in text[0]
    assert text[1] == "  rank 0: predicted 0.12 GiB (tables 100.00 MiB, dense part 28.00 MiB), measured 0.20 GiB"
    assert text[2].startswith("  rank 1: ") and text[2].endswith("7.00 MiB")


def test_a_rank_that_took_nothing_more_is_said_to_have_not_grown() -> None:
    """It said measured 0.00 KiB."""
    _, first, second = describe_memory(drawn_plan(4, 2, device="cpu")[0], [0, MIB], "cpu")
    assert first.endswith("measured no growth") and second.endswith("measured 1.00 MiB")


def test_of_many_ranks_the_fullest_are_told() -> None:
    lines = describe_memory(drawn_plan(4, 40)[0], [rank * MIB for rank in range(40)], "cuda")
    assert lines[1].startswith("  rank 24: ") and lines[-1] == "  and 24 ranks that take less"
