"""What programs over a few ranks and annealing make of a start that overfills ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.planner.search.annealing import FULL_RANKS, improve_by_annealing
from pipeline.planner.search.problem import Assignment, SearchProblem, score, violations
from tests.planner.test_neighbourhoods import on_ranks, problem_of, run, single


def anneal(problem: SearchProblem, start: Assignment, moves: int = 60_000, seed: int = 0) -> Assignment | None:
    pytest.importorskip("numba")
    return improve_by_annealing(
        problem, start, "critical_path", schedule=FULL_RANKS, moves=moves, seed=seed,
        scale_ms=score(problem, start).critical_path_ms, stop=lambda: False,
    )  # fmt: skip


Improve = Callable[[SearchProblem, Assignment], Assignment | None]
methods = pytest.mark.parametrize("improve", [run, anneal], ids=["programs", "annealing"])


@methods
def test_an_overfull_start_is_laid_so_that_it_fits_where_each_rank_is_full_to_the_byte(improve: Improve) -> None:
    sizes = [9, 8, 7, 6, 4, 3, 2, 1]  # only 9 + 1, 8 + 2, 7 + 3 and 6 + 4 fill four ranks of 10
    problem = problem_of([[single([1.0, 2.0], size)] for size in sizes], ranks=4, room=10.0)
    found = improve(problem, on_ranks(0, 0, 1, 1, 2, 2, 3, 3))
    assert found is not None and not violations(problem, found)
    assert score(problem, found).critical_path_ms == pytest.approx(6.0)


@methods
def test_where_nothing_fits_there_is_no_assignment(improve: Improve) -> None:
    problem = problem_of([[single([1.0], 6)] for _ in range(3)], ranks=2, room=10.0)
    assert improve(problem, on_ranks(0, 0, 1)) is None
