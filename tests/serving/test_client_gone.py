"""A client that goes away in mid-answer is nobody's error: it is counted, and the log has no traceback."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from pipeline.config.serving import LimitsConfig
from pipeline.serving.http.admission import Admission, Tokens
from pipeline.serving.http.app import CLIENT_GONE, HUNG_UP, _Watched
from pipeline.serving.http.batching import ServerMetrics


def test_an_answer_to_a_connection_that_was_closed_since_is_nobodys_error(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def closed(message: Any) -> None:
        raise RuntimeError(f"unable to perform operation on <TCPTransport closed=True>; {HUNG_UP}")

    watched = _Watched(app, app, ServerMetrics(), [Route("/docs", app)], Admission([], LimitsConfig(), Tokens([])))
    with caplog.at_level(logging.DEBUG):
        asyncio.run(watched({"type": "http", "path": "/docs", "method": "GET", "headers": []}, None, closed))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.long
def test_a_request_that_outlasts_the_drain_is_told_so_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Any] = []

    async def score(request: Any) -> Any:
        await asyncio.Event().wait()

    async def note(message: Any) -> None:
        sent.append(message)

    async def drain() -> None:
        watched = _Watched(
            score, score, ServerMetrics(), [Route("/score", score)], Admission([], LimitsConfig(), Tokens([]))
        )
        scope = {"type": "http", "path": "/score", "method": "POST", "headers": []}
        task = asyncio.create_task(watched(scope, None, note))
        await asyncio.sleep(0)
        task.cancel()  # as uvicorn does at the end of the drain
        await task

    with caplog.at_level(logging.DEBUG):
        asyncio.run(drain())
    assert sent[0]["status"] == 503 and b"another" in sent[1]["body"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("error", [ClientDisconnect(), BrokenPipeError("gone"), ConnectionResetError("gone")])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_goes_away_is_counted_and_not_logged(
    error: Exception, begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Any] = []
    metrics = ServerMetrics()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    async def score(request: Any) -> Any:
        raise error

    async def note(message: Any) -> None:
        sent.append(message)

    watched = _Watched(app, score, metrics, [Route("/docs", app)], Admission([], LimitsConfig(), Tokens([])))
    with caplog.at_level(logging.DEBUG):
        asyncio.run(watched({"type": "http", "path": "/docs", "method": "GET", "headers": []}, None, note))
    status = "200" if begun else str(CLIENT_GONE)
    assert (
        metrics.registry.get_sample_value("pipeline_serving_requests_total", {"path": "/docs", "status": status}) == 1
    )
    assert len(sent) == begun and not [record for record in caplog.records if record.exc_info]
