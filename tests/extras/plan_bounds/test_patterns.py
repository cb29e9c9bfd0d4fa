"""Bounds by patterns of a rank: never above the best plan, and above those that know no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.extras.plan_bounds.patterns import PatternBound, Work, can_bound
from pipeline.planner.search.incumbent import SearchConfig
from pipeline.planner.search.portfolio import search
from pipeline.planner.search.problem import OBJECTIVES, Rule, SearchProblem, score
from pipeline.planner.search.relaxation import LinearProgram
from tests.planner.small_problems import problem_of, single, spread
from tests.planner.test_search import best_by_brute_force, draw_problem, seeds

pytest.importorskip("numba")


def work(patterns: int = 3000) -> Work:
    return Work(patterns, lambda: False)


def subsets_of_kinds(problem: SearchProblem) -> list[tuple[str, ...]]:
    kinds = list(problem.kind_ms)
    return [tuple(kind for place, kind in enumerate(kinds) if number >> place & 1) for number in range(1 << len(kinds))]


def highest_proven(problem: SearchProblem, objective: str, optimum: float) -> float:
    """Of cutoffs below and above the optimum, in its units, each proven for all sets of kinds in use."""
    bounds = [PatternBound(problem, objective, left_out) for left_out in subsets_of_kinds(problem)]
    proven = 0.0
    for share in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0 + 1e-6, 1.001, 1.05):
        if not all(bound.proves(share * optimum, work(30)) for bound in bounds):
            break
        proven = share
    return proven


@pytest.mark.long
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", seeds(2, 80))
def test_nothing_above_the_best_plan_is_ever_proven(seed: int, objective: str) -> None:
    """Against brute force: tables of all rules, two equal ones among them, and memory that is scarce in places."""
    local, tightness = 2 - seed % 2, 1.0 + seed % 4 / 4
    drawn = draw_problem(seed, 3, 2, local, tightness, num_phases=3, latency=seed // 2 % 2 * 2.0)
    problem = replace(drawn, tables=[*drawn.tables, drawn.tables[0]], capacity=drawn.capacity * 4 / 3)
    optimum = best_by_brute_force(problem, objective)
    if np.isfinite(optimum):
        assert highest_proven(problem, objective, optimum) <= 1.0


@pytest.mark.long
def test_shards_that_do_not_fill_ranks_evenly_raise_the_bound() -> None:
    """Five equal tables of 1 ms on two ranks: 2.5 by a mean of loads, 3 by any plan."""
    problem = problem_of([[single([1.0], 1)] for _ in range(5)], ranks=2, room=10.0)
    assert LinearProgram(problem, "critical_path").solve().bound_ms == pytest.approx(2.5, rel=1e-5)
    bound = PatternBound(problem, "critical_path")
    assert bound.proves(2.99, work()) and not bound.proves(3.01, work())


@pytest.mark.long
def test_memory_that_keeps_tables_apart_raises_the_bound() -> None:
    """Two tables of 6 in ranks of 9 leave two ranks for four tables of 4, which cost 1 each."""
    problem = problem_of([*([single([0.0], 6)] for _ in range(2)), *([single([1.0], 4)] for _ in range(4))], 4, 9.0)
    relaxed = LinearProgram(problem, "critical_path").solve().bound_ms
    assert relaxed == pytest.approx(1.0, rel=1e-5) and best_by_brute_force(problem, "critical_path") == pytest.approx(
        2.0
    )
    bound = PatternBound(problem, "critical_path")
    assert bound.proves(1.99, work()) and not bound.proves(2.01, work())


def test_equal_maxima_become_one_that_weighs_more() -> None:
    problem = problem_of([[single([1.0, 2.0, 0.5], 1)] for _ in range(4)], ranks=2, room=10.0)
    bound = PatternBound(problem, "critical_path")
    assert bound.weights.tolist() == pytest.approx([3.5])
    assert bound.proves(6.99, work()) and not bound.proves(7.01, work())


def test_a_table_without_an_option_of_the_kinds_in_use_has_no_plan() -> None:
    problem = problem_of([[spread([1.0], 1, 2, Rule.EVERY_RANK, "rows")]], 2, 10.0, latency_ms={"rows": np.ones(1)})
    assert PatternBound(problem, "critical_path", ("rows",)).proves(1e9, work())
    assert not PatternBound(problem, "critical_path").proves(2.01, work())


def test_work_is_counted_and_ends() -> None:
    problem = problem_of([[single([1.0], 1)] for _ in range(5)], ranks=2, room=10.0)
    counted = work(3)
    assert PatternBound(problem, "critical_path").proves(2.99, counted) and 0 <= counted.patterns < 3
    assert not PatternBound(problem, "critical_path").proves(2.99, work(0))
    assert not PatternBound(problem, "critical_path").proves(2.99, Work(3000, lambda: True))


WITHOUT = SearchConfig(local_steps=(), start_steps=0, exact_variables=0, anneal_moves=0)


def test_a_search_takes_the_higher_bound_and_only_where_tables_are_equal() -> None:
    problem = problem_of([[single([1.0, 1.1], 1)] for _ in range(9)], ranks=4, room=10.0)
    found = search(problem, WITHOUT)
    before = search(problem, replace(WITHOUT, bound_options=0))
    assert found.score == before.score and before.lower_bound_ms < found.lower_bound_ms
    assert found.lower_bound_ms <= score(problem, found.assignment).critical_path_ms
    assert can_bound(problem, 1) and not can_bound(problem, 0)
    unequal = problem_of([[single([1.0 + index, 1.0], 1)] for index in range(9)], ranks=4, room=10.0)
    assert not can_bound(unequal, 120)
