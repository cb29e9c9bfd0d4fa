"""Small search problems of hand-made options, for tests of the search."""

from __future__ import annotations

import numpy as np

from pipeline.planner.search.problem import Assignment, Option, Rule, SearchProblem

GIB = float(1 << 30)


def single(cost: list[float], memory: float, kind: str = "table_wise") -> Option:
    return Option(Rule.ANY_RANK, np.array([cost]), np.array([[memory * GIB, 0.0]]), kind)


def spread(cost: list[float], memory: float, shards: int, rule: Rule, kind: str) -> Option:
    memories = np.tile([memory * GIB, 0.0], (shards, 1))
    return Option(rule, np.tile(cost, (shards, 1)), memories, kind)


def problem_of(tables: list[list[Option]], ranks: int, room: float, local: int = 2, **more: object) -> SearchProblem:
    capacity = np.tile([room * GIB, 1.0], (ranks, 1))
    return SearchProblem(tables, capacity, local, **more)


def on_ranks(*ranks: int) -> Assignment:
    return Assignment([0] * len(ranks), [np.array([rank]) for rank in ranks])
