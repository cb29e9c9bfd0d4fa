from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.planner.search import annealing, exact
from pipeline.planner.search.annealing import (
    EVEN_LOADS,
    FULL_RANKS,
    MANY_RANKS,
    NEAREST,
    Annealing,
    improve_by_annealing,
    pack,
)
from pipeline.planner.search.incumbent import SearchConfig
from pipeline.planner.search.portfolio import search
from pipeline.planner.search.problem import Assignment, Rule, SearchProblem, loads, score, violations
from pipeline.planner.search.ranks import RankState, fill
from tests.planner.small_problems import GIB, on_ranks, problem_of, single, spread
from tests.planner.test_search import draw_problem

pytest.importorskip("numba")


def run(problem: SearchProblem, start: Assignment, moves: int = 60_000, seed: int = 0) -> Assignment | None:
    return improve_by_annealing(
        problem,
        start,
        "critical_path",
        schedule=FULL_RANKS,
        moves=moves,
        seed=seed,
        scale_ms=score(problem, start).critical_path_ms,
        stop=lambda: False,
    )


@pytest.mark.long
def test_an_overfull_start_is_packed_until_it_fits_even_if_each_rank_must_be_full() -> None:
    sizes = [9, 8, 7, 6, 4, 3, 2, 1]  # only 9 + 1, 8 + 2, 7 + 3 and 6 + 4 fill four ranks of 10
    problem = problem_of([[single([1.0, 2.0], size)] for size in sizes], ranks=4, room=10.0)
    found = run(problem, on_ranks(0, 0, 1, 1, 2, 2, 3, 3))
    assert found is not None and not violations(problem, found)
    assert score(problem, found).critical_path_ms == pytest.approx(6.0)


def test_if_nothing_fits_annealing_returns_none() -> None:
    problem = problem_of([[single([1.0], 6)] for _ in range(3)], ranks=2, room=10.0)
    assert run(problem, on_ranks(0, 0, 1)) is None


def test_without_a_plan_the_search_anneals_the_cheapest_overfull_choice() -> None:
    """No greedy placement fits these sizes, and integer programs are switched off."""
    sizes = [9, 8, 7, 6, 4, 3, 2, 1]
    tables = [[single([float(size), 1.0], size)] for size in sizes]
    problem = problem_of(tables, ranks=4, room=10.0)
    config = SearchConfig(local_steps=(), start_steps=0, exact_variables=0, anneal_moves=60_000)
    found = search(problem, config)
    assert not violations(problem, found.assignment)


@pytest.mark.parametrize("rule", [Rule.EVERY_RANK, Rule.ONE_HOST], ids=["every_rank", "one_host"])
def test_a_table_is_sharded_otherwise_where_that_pays_for_its_collective(rule: Rule) -> None:
    shards = 4 if rule is Rule.EVERY_RANK else 2

    def best(latency: float) -> float:
        options = [single([4.0], 1), spread([4.0 / shards], 1 / shards, shards, rule, "rows")]
        problem = problem_of([options], 4, 10.0, latency_ms={"rows": np.array([latency])})
        found = run(problem, on_ranks(0))
        assert found is not None
        return score(problem, found).critical_path_ms

    assert best(0.5) == pytest.approx(4.0 / shards + 0.5)
    assert best(3.5) == pytest.approx(4.0)


def test_hosts_keep_their_memory() -> None:
    tables = [[single([float(cost)], 3)] for cost in (4, 3, 2, 1)]
    problem = problem_of(tables, 4, 10.0, host_memory=np.array([[6 * GIB, np.inf], [6 * GIB, np.inf]]))
    found = run(problem, on_ranks(0, 0, 0, 2))
    assert found is not None and not violations(problem, found)
    assert score(problem, found).max_rank_ms == pytest.approx(4.0)


@pytest.mark.parametrize("objective", ["critical_path", "max_rank"])
@pytest.mark.parametrize("seed", range(4))
def test_rules_are_kept_and_sums_stay_those_of_the_assignment(seed: int, objective: str) -> None:
    """Options of all rules, some of several shards that may not share a rank, on two hosts of two ranks."""
    problem = draw_problem(seed, 9, 4, 2, 3.0, num_phases=3, latency=1.0)
    problem = replace(
        problem,
        tables=[[replace(each, distinct_ranks=seed % 2 == 1) for each in options] for options in problem.tables],
    )
    state = RankState(problem, objective, 1.0)
    assert fill(state, None, list(range(9)))
    start = state.assignment()
    annealing = Annealing(problem, start, objective, seed)
    for share in (0.0, 0.5, 1.0):
        annealing.go(3000, score(problem, start).of(objective), EVEN_LOADS, share)
        now = annealing.now()
        assert not [broken for broken in violations(problem, now) if "rule" in broken]
        cost, memory = loads(problem, now)
        expected = cost.sum(axis=1, keepdims=True) if objective == "max_rank" else cost
        np.testing.assert_allclose(annealing.laid.load, expected, atol=1e-9)
        np.testing.assert_array_equal(annealing.laid.memory, memory)
        over = np.maximum(memory - problem.capacity, 0.0).sum()
        assert annealing.laid.over[0] == over
    found = annealing.found()
    assert found is not None and not violations(problem, found)
    assert score(problem, found).of(objective) == pytest.approx(annealing.best[0])
    assert score(problem, found).of(objective) <= score(problem, start).of(objective) * (1 + 1e-9)


def test_a_seed_gives_one_result() -> None:
    problem = draw_problem(1, 9, 4, 2, 3.0, num_phases=3, latency=1.0)
    state = RankState(problem, "critical_path", 1.0)
    assert fill(state, None, list(range(9)))
    first, again = (run(problem, state.assignment(), moves=6000) for _ in range(2))
    assert first is not None and again is not None and first.choices == again.choices
    assert all((one == other).all() for one, other in zip(first.ranks, again.ranks, strict=True))


def uneven(tightness: float = 1.02) -> SearchProblem:
    generator = np.random.default_rng(2)
    tables = [[single(generator.random(3).tolist(), float(generator.random()))] for _ in range(24)]
    total = sum(float(options[0].memory[0, 0]) for options in tables) / GIB
    return problem_of(tables, ranks=4, room=tightness * total / 4)


WITHOUT = SearchConfig(local_steps=(), start_steps=0, exact_variables=0, anneal_moves=0)


def test_the_search_takes_what_annealing_finds() -> None:
    problem = uneven()
    found = search(problem, replace(WITHOUT, anneal_moves=60_000))
    assert found.winner == "annealing" and not violations(problem, found.assignment)
    assert found.score.critical_path_ms < search(problem, WITHOUT).score.critical_path_ms


def test_without_numba_the_search_does_without_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealing, "can_anneal", lambda: False)
    found = search(uneven(), replace(WITHOUT, anneal_moves=60_000))
    assert "annealing" not in found.values and found.score == search(uneven(), WITHOUT).score


@pytest.mark.parametrize(
    ("easy_variables", "tightness", "tries"),
    [(10**6, 3.0, 1), (0, 3.0, annealing.ENOUGH_IN_VAIN), (10**6, 1.02, annealing.ENOUGH_IN_VAIN)],
    ids=["easy", "hard", "easy_in_scarce_memory"],
)
def test_annealing_in_vain_ends_sooner_where_the_integer_program_is_easy_and_there_is_room(
    monkeypatch: pytest.MonkeyPatch, easy_variables: int, tightness: float, tries: int
) -> None:
    begun = []
    monkeypatch.setattr(annealing, "improve_by_annealing", lambda *_, **options: begun.append(options["moves"]))
    config = replace(WITHOUT, anneal_moves=1000, easy_variables=easy_variables)
    found = search(uneven(tightness), config)
    assert len(begun) == tries and begun[0] <= begun[-1] and found.winner != "annealing"


def test_annealing_ends_once_an_integer_program_that_is_not_easy_has_proven_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went on for a minute with plans that a second of the program would have proven."""
    begun = []
    monkeypatch.setattr(annealing, "improve_by_annealing", lambda *_, **options: begun.append(options["moves"]))
    asked = []

    def solve(*_: Any, bound: float, cutoff: float, max_nodes: int, **__: Any) -> exact.ExactResult:
        asked.append((len(begun), max_nodes > 1))
        return exact.ExactResult(None, cutoff if begun else bound, bool(begun))

    monkeypatch.setattr(exact, "solve", solve)
    result = search(uneven(3.0), replace(WITHOUT, anneal_moves=1000, easy_variables=0, exact_variables=10**6))
    assert asked == [(0, False), (1, True)] and len(begun) == 1 and result.gap == 0.0


def test_on_many_ranks_tables_alike_in_cost_are_known() -> None:
    tables = [[single([float(cost), 1.0], 1)] for cost in range(100)]
    few, many = (pack(problem_of(tables, ranks, 200.0), "critical_path") for ranks in (MANY_RANKS, 2 * MANY_RANKS))
    assert few.alike.shape == (100, 0) and many.alike.shape == (100, NEAREST)
    assert set(many.alike[50]) == set(range(50 - NEAREST // 2, 51 + NEAREST // 2)) - {50}
    assert (many.alike != np.arange(100)[:, None]).all()
