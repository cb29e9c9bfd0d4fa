"""Plans refined by a price of whole plans, which no sum over shards gives."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from pipeline.config.planner import PlannerConfig
from pipeline.extras.step_time.plan_forecast import step_request
from pipeline.extras.step_time.prediction import StepCost
from pipeline.extras.step_time.refine import refine
from pipeline.extras.step_time.work import placements_of
from pipeline.planner.planner import make_plan
from pipeline.planner.request import PlanRequest
from pipeline.planner.search.problem import Assignment, Option, Rule, SearchProblem, loads, violations
from pipeline.runtime.errors import PlanError
from tests.extras.step_time.step_jobs import SmallStep, calibrated
from tests.support.messages import mentions, names

JOB = SmallStep()


def tables(generator: random.Random, count: int) -> list[list[Option]]:
    """Each on one of two ranks, or in two halves."""
    found = []
    for _ in range(count):
        cost = generator.uniform(1.0, 10.0)
        whole = Option(Rule.ANY_RANK, np.array([[cost]]), np.array([[1.0]]), "whole")
        halves = Option(Rule.EVERY_RANK, np.full((2, 1), 0.6 * cost), np.full((2, 1), 0.5), "halves")
        found.append([whole, halves])
    return found


def price_of(problem: SearchProblem, assignment: Assignment) -> float:
    """The slowest rank, and what each kind in use costs once."""
    kinds = {options[choice].kind for options, choice in zip(problem.tables, assignment.choices, strict=True)}
    return float(loads(problem, assignment)[0].sum(axis=1).max()) + 2.0 * len(kinds)


def every_plan(problem: SearchProblem) -> list[Assignment]:
    ways = [(0, np.array([0])), (0, np.array([1])), (1, np.array([0, 1]))]
    plans = [
        Assignment([way[0] for way in chosen], [way[1] for way in chosen])
        for chosen in itertools.product(ways, repeat=len(problem.tables))
    ]
    return [plan for plan in plans if not violations(problem, plan)]


@pytest.mark.parametrize("seed", range(5))
def test_the_refined_plan_is_valid_never_dearer_and_near_the_best_of_all(seed: int) -> None:
    generator = random.Random(seed)
    problem = SearchProblem(tables(generator, 5), np.full((2, 1), 4.0), 2)
    start = Assignment([0] * 5, [np.array([index % 2]) for index in range(5)])
    found = refine(problem, [start], lambda plan: price_of(problem, plan), lambda: False)
    assert not violations(problem, found.assignment) and found.priced > 5
    assert found.price == price_of(problem, found.assignment) <= found.start == price_of(problem, start)
    best = min(price_of(problem, plan) for plan in every_plan(problem))
    assert found.price <= 1.15 * best


@pytest.mark.parametrize(("gain", "is_taken"), [(0.02, False), (0.05, True)], ids=["2 %", "5 %"])
def test_a_gain_that_the_price_cannot_tell_leaves_the_plan_as_it_was(gain: float, is_taken: bool) -> None:
    problem = SearchProblem(tables(random.Random(0), 3), np.full((2, 1), 9.0), 2)
    start = Assignment([0] * 3, [np.array([0])] * 3)
    found = refine(problem, [start], lambda plan: 1.0 - gain * (sum(plan.choices) > 0), lambda: False)
    assert (found.assignment is not start) == is_taken
    assert found.price == (1.0 - gain if is_taken else 1.0)


def test_a_plan_of_one_kind_is_found_where_no_single_change_leads_to_it() -> None:
    problem = SearchProblem(tables(random.Random(0), 4), np.full((2, 1), 9.0), 2)

    def price(plan: Assignment) -> float:
        return {0: 10.0, 4: 1.0}.get(sum(plan.choices), 20.0)  # all whole 10, all in halves 1, mixed ones 20

    start = Assignment([0] * 4, [np.array([0])] * 4)
    assert refine(problem, [start], price, lambda: False).assignment.choices == [1] * 4


def test_a_stop_leaves_the_best_so_far() -> None:
    problem = SearchProblem(tables(random.Random(0), 4), np.full((2, 1), 9.0), 2)
    start = Assignment([0] * 4, [np.array([0])] * 4)
    found = refine(problem, [start], lambda plan: price_of(problem, plan), lambda: True)
    assert found.assignment is start and found.priced == 1


def test_step_time_as_the_objective_gives_the_plan_whose_predicted_step_is_shortest() -> None:
    planner, request, cost = request_of_two_ranks()
    plans = {
        objective: make_plan(replace(planner, objective=objective), request)
        for objective in ("critical_path", "step_time")
    }
    times = {objective: cost.ms(placements_of(record.plan)) for objective, record in plans.items()}
    assert times["step_time"] <= times["critical_path"]
    assert plans["step_time"].objective.minimised == "step_time" and plans["step_time"].objective.gap is None
    with pytest.raises(PlanError, match=names("step_time critical_path")):
        make_plan(replace(planner, objective="step_time"), replace(request, step_cost=None))


def request_of_two_ranks() -> tuple[PlannerConfig, PlanRequest, StepCost]:
    """Two CPU ranks that a calibration has measured."""
    resolved, request = JOB.request(2, calibration="measured.json")
    cost = StepCost(step_request(resolved, request, None, 1), calibrated("2x1"))
    return resolved.job.planner, replace(request, step_cost=lambda _: cost), cost


def test_by_default_the_step_counts_on_ranks_that_a_calibration_has_measured() -> None:
    config, request, _ = request_of_two_ranks()
    config = replace(config, objective=PlannerConfig().objective, timeout_s=60.0)  # ends before, so plans are equal
    record = make_plan(config, request)
    assert record.objective.minimised == "step_time" and record.objective.gap is None
    assert (
        record.plan
        == make_plan(config, request).plan
        == make_plan(replace(config, objective="step_time"), request).plan
    )
    for other, config_of in (
        (replace(request, calibration=None), config),
        (replace(request, step_cost=None), config),
        (request, replace(config, predict_step=False)),
        (request, replace(config, objective="critical_path")),
    ):
        record = make_plan(config_of, other)
        assert record.objective.minimised == "critical_path" and record.objective.gap is not None


def test_a_calibration_that_lacks_the_ranks_leaves_the_plan_to_critical_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, request, _ = request_of_two_ranks()

    def step_cost(request: PlanRequest) -> StepCost:
        return StepCost(step_request(JOB.resolve(2), request, None, 1), calibrated("1x1"))

    record = make_plan(replace(config, objective="auto"), replace(request, step_cost=step_cost))
    assert record.objective.minimised == "critical_path" and record.objective.gap is not None
    assert mentions(caplog.text, "planned by critical_path step cannot be predicted 1x1 2x1")
