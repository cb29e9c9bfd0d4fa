from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.extras.pages.compare import compare
from pipeline.planner.plan_record import PlanDescription
from tests.planner.plans import drawn_plan

GIB = 1 << 30


def moved(plan: PlanDescription) -> PlanDescription:
    """`plan` with its first table elsewhere and rank 1 heavier and slower."""
    choice, *others = plan.tables
    first = replace(
        choice, sharding_type="row_wise", compute_kernel="fused", ranks=[0, 1], cost_ms=choice.cost_ms + 0.5
    )
    rank = plan.ranks[1]
    heavier = replace(rank, hbm_bytes=rank.hbm_bytes + 2 * GIB, forward_comms_ms=rank.forward_comms_ms + 0.25)
    objective = replace(plan.objective, max_rank_ms=plan.objective.max_rank_ms * 1.1, gap=None)
    return replace(plan, tables=[first, *others], ranks=[plan.ranks[0], heavier], objective=objective)


def test_what_moved_and_what_it_costs_is_told() -> None:
    plan, _ = drawn_plan(6, 2, seed=1)
    text = compare(plan, moved(plan))
    assert "both are for the same tables, hardware, optimizer and batch size" in text
    assert "1 of 6 tables moved, 1 of them with another sharding, 0 only on other ranks" in text
    table = next(line for line in text.splitlines() if " table_0 " in line)
    assert "row_wise fused" in table and f"{plan.tables[0].cost_ms:.4g} +0.5" in table
    assert "table_1" not in text
    rank = next(line for line in text.splitlines() if "+2.00 GiB" in line)
    assert rank.split()[0] == "1" and "+0.25" in rank
    assert "(+10.00 %)" in text and "(+0.00 %)" in text
    assert "A is at most 1.23 % above the best critical_path" in text and "B is at most" not in text


def test_equal_plans_have_nothing_to_tell() -> None:
    plan, _ = drawn_plan(6, 2)
    text = compare(plan, plan)
    assert "0 of 6 tables moved" in text and "every rank has the same load" in text and "GiB" not in text


@pytest.mark.long
def test_plans_for_other_jobs_say_so_and_are_compared_as_far_as_they_go() -> None:
    two, _ = drawn_plan(6, 2)
    eight, _ = drawn_plan(8, 8)
    text = compare(two, eight)
    assert "they are made for different jobs:" in text
    assert "topology.world_size: 2 in A, 8 in B" in text
    assert "only in B: table_6, table_7" in text
    assert "ranks: 2 in A, 8 in B" in text
    many = compare(drawn_plan(200, 16, seed=1)[0], drawn_plan(200, 16, seed=2)[0])
    assert len(many.splitlines()) < 100 and "more, whose cost changes less" in many


def test_other_library_versions_are_told() -> None:
    plan, _ = drawn_plan(2, 2)
    newer = replace(plan, fingerprint={**plan.fingerprint, "libraries": {"torch": "2.14.0"}})
    assert "B was made with torch 2.14.0 (A 2.13.0)" in compare(plan, newer)
