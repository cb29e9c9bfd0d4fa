"""No test asserts that something is fast: on a busy machine it would fail though nothing is wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "times"}


def _reads_clock(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in CLOCKS
        for part in ast.walk(node)
    )


def _is_duration(node: ast.AST, durations: set[str]) -> bool:
    """A difference that reads a clock, or a name that stands for one."""
    if isinstance(node, ast.Name):
        return node.id in durations
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and _reads_clock(part) for part in ast.walk(node)
    )


def upper_limits(source: str) -> list[int]:
    """Lines of asserts that a duration is below something."""
    found = []
    tree = ast.parse(source)
    durations = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_duration(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in (part for each in ast.walk(tree) if isinstance(each, ast.Assert) for part in ast.walk(each.test)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
            below = left if isinstance(operator, ast.Lt | ast.LtE) else right
            if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and _is_duration(below, durations):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("assert time.monotonic() - began < 10", [1]),
        ("seconds = time.perf_counter() - began\nassert 4 < seconds <= 10", [2]),
        ("seconds = time.monotonic() - began\nassert 10 > seconds", [2]),
        ("seconds = time.monotonic() - began\nassert seconds > 1", []),  # a wait that must have been
        ("until = time.monotonic() + 300\nassert time.monotonic() < until", []),  # a guard against hanging
    ],
)
def test_upper_limits_of_durations_are_found(source: str, lines: list[int]) -> None:
    assert upper_limits(source) == lines


def test_no_test_has_an_upper_limit_of_a_duration() -> None:
    limits = {
        str(path.relative_to(TESTS)): lines
        for path in sorted(TESTS.rglob("*.py"))
        if (lines := upper_limits(path.read_text()))
    }
    assert limits == {}
