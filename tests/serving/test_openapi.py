"""schemathesis makes requests from the server's own OpenAPI page, sound and unsound: none may end in a 5xx or a crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.serving.servers import LIMITS, Server, server_of, write_artifact

OPERATIONS = [
    ("POST", "/score"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(write_artifact(tmp_path_factory.mktemp("artifact"), "v1"), *LIMITS) as server:
        yield server
        assert server.process.poll() is None, "it crashed"
        assert "a request failed" not in server.log()


def ask(server: Server, operation: tuple[str, str], mode: GenerationMode, count: int) -> dict[int, int]:
    """Status -> how many of `count` requests; every answer is as the page says."""
    method, path = operation
    page = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: dict[int, int] = {}

    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(case=page[path][method].as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        answer = case.call(timeout=30) if _has_a_column_twice(case.body) else case.call_and_validate(timeout=30)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

    run()
    return statuses


def _has_a_column_twice(body: Any) -> bool:
    """For the user and for an item: a schema cannot say that two objects must have different keys."""
    if not isinstance(body, dict) or not isinstance(user := body.get("user"), dict):
        return False
    items = body.get("items")
    return isinstance(items, list) and any(isinstance(item, dict) and item.keys() & user.keys() for item in items)


@pytest.mark.long
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_requests_made_from_the_page_are_answered_as_it_says(server: Server, mode: GenerationMode) -> None:
    statuses = ask(server, ("POST", "/score"), mode, 12)
    assert (200 in statuses) == (mode == GenerationMode.POSITIVE) and max(statuses) < 500


@pytest.mark.campaign
@pytest.mark.parametrize("operation", OPERATIONS, ids="".join)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_thousands_of_requests_made_from_the_page_are_answered_as_it_says(
    server: Server, operation: tuple[str, str], mode: GenerationMode
) -> None:
    if mode == GenerationMode.NEGATIVE and operation[0] == "GET":
        pytest.skip("a GET without parameters has nothing to get wrong")
    assert max(ask(server, operation, mode, 1000)) < 500
