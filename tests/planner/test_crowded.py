"""A table that nearly fills a host's ranks leaves little room beside it: that raises the bound, and never above the best plan."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.planner.search.problem import OBJECTIVES, Rule
from pipeline.planner.search.relaxation import LinearProgram
from tests.planner.small_problems import problem_of, single, spread
from tests.planner.test_search import best_by_brute_force, draw_problem, seeds


def test_what_a_full_host_cannot_take_raises_the_bound() -> None:
    """10 ms of one phase fill a host; four tables of 4 ms of the other phase bring 1 ms more of the first wherever they lie."""
    tables = [[spread([10.0, 0.0], 1, 2, Rule.ONE_HOST, "host")], *([single([1.0, 4.0], 1)] for _ in range(4))]
    problem = problem_of(tables, ranks=4, room=10.0)
    program = LinearProgram(problem, "critical_path")
    relaxation = program.solve()
    assert relaxation.bound_ms == pytest.approx(14.0, rel=1e-5) and program.crowd(relaxation)
    assert program.solve().bound_ms == pytest.approx(15.0, rel=1e-5)
    assert best_by_brute_force(problem, "critical_path") == pytest.approx(15.0)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", seeds(1, 60))
def test_crowded_rows_never_exclude_the_best_plan(seed: int, objective: str) -> None:
    problem = draw_problem(seed, 3, 4, 2, 3.0, num_phases=3, latency=seed % 2)
    program = LinearProgram(problem, objective)
    relaxation = program.solve()
    optimum = best_by_brute_force(problem, objective)
    if relaxation.bound_ms is None or np.isinf(optimum):
        return
    program.crowd(relaxation)
    bound = program.solve().bound_ms
    assert bound is not None and relaxation.bound_ms * (1 - 1e-6) <= bound <= optimum * (1 + 1e-9)
