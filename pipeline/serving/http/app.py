"""Route HTTP requests: scores, items, errors as JSON, /health and /metrics.

POST /score, or /retrieve for a two-tower GET /health, /health/live, /health/ready GET /metrics GET
/openapi.json, /docs, and the routes of an extra
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.config.registry import if_installed
from pipeline.config.serving import LimitsConfig
from pipeline.runtime.logs import get_logger
from pipeline.serving.http.admission import Admission
from pipeline.serving.http.batching import Asked, Overloaded, Scores, ServerMetrics
from pipeline.serving.http.observers import REQUEST_ID, Answered, Observers, id_of
from pipeline.serving.http.openapi import docs_page, openapi_page
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, BadRequest
from pipeline.serving.http.routing import Router, read_rows
from pipeline.serving.http.switching import RETRIEVE, SCORE, ModelSlot, ServedModel
from pipeline.serving.scoring.load import cache_counts
from pipeline.serving.scoring.scorer import Scorer, has_scores, score_columns

CLIENT_GONE = 499  # as nginx counts it
HUNG_UP = "the handler is closed"  # uvloop's words for a connection that was closed since
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
logger = get_logger(__name__)


class ScoringApp:
    """Handles the requests of one server. `draining`: a SIGTERM has come, and /health/ready reports "not ready"."""

    def __init__(
        self,
        slot: ModelSlot,
        limits: LimitsConfig,
        metrics: ServerMetrics,
        admission: Admission,
        observers: Observers,
        router: Router | None = None,
    ) -> None:
        self._slot, self._limits, self._metrics, self._observers = slot, limits, metrics, observers
        self._router = router
        self.draining = False
        self._tables = ("", 0, 0)  # key of the artifact, lookups and hits that are counted already
        routes = [
            *(Route(path, self.score, methods=["POST"]) for path in (SCORE, RETRIEVE)),
            Route("/health", self.health),
            Route("/health/live", self.live),
            Route("/health/ready", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
        ]
        if more := if_installed("server_routes"):
            routes += more(self)
        handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {HTTPException: self._http_error}
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        starlette.router.redirect_slashes = False
        self.asgi = _Watched(starlette, self.score, metrics, routes, admission)

    async def score(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()

        def read(model: ServedModel, body: bytes) -> Asked:
            if request.url.path != model.path:
                raise BadRequest(404, f"artifact {model.scorer.version} is asked by {model.path}; /docs says how")
            return model.reader.read(body, kind)

        def answer(model: ServedModel, scored: Scores) -> Response:
            if model.retrieves:
                return self._retrieved(model, scored)
            return _answer(model.scorer, scored, _wanted(request, kind))

        return await self.answered(request, read, answer)

    async def answered(
        self,
        request: Request,
        read: Callable[[ServedModel, bytes], Asked],
        answer: Callable[[ServedModel, Scores], Response],
    ) -> Response:
        """Read the body, score its rows, and answer. Every error of the request becomes a response."""
        try:
            body = await read_body(request, self._limits)
            request_id = id_of(request.headers.get(REQUEST_ID)) if self._observers or self._router else ""
            if self._router is None:
                with self._slot.hold() as model:
                    rows = await read_rows(model, body, read)
                    scored = await model.batcher.score(rows)
            else:
                model, rows, scored = await self._router.score(request_id, body, read)
            response = answer(model, scored)
            if request_id:
                self._observers.show(Answered(request_id, time.time(), rows, scored, model))
                response.headers[REQUEST_ID] = request_id
            return response
        except BadRequest as error:
            # What is left of the body is not read: the connection cannot be used again.
            close = {"Connection": "close"} if error.status in (408, 413) else None
            return problem(error.status, error.message, close, **error.more)
        except Overloaded as error:
            return problem(503, str(error), {"Retry-After": str(error.retry_after_s)})
        except ValueError as error:  # the scorer's own look at the rows
            return problem(422, " ".join(str(error).split())[:500])

    @property
    def model(self) -> ServedModel:
        return self._slot.model

    @property
    def is_ready(self) -> bool:
        return self._slot.is_loaded and not self.draining

    def _retrieved(self, model: ServedModel, scored: Scores) -> Response:
        if len(scored.refused) == len(scored.scores) > 0:
            return _all_refused(scored, "no row can be asked for")
        answer: Response
        answer, num_items = model.scorer.answer(scored)  # type: ignore[attr-defined]
        self._metrics.retrieved_items.inc(num_items)
        return answer

    async def health(self, request: Request) -> Response:
        ready = self.is_ready
        values = {"status": "ready" if ready else "not ready", "artifact": self._slot.model.scorer.version}
        return JSONResponse(values, 200 if ready else 503)

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def metrics(self, request: Request) -> Response:
        self._count_tables()
        scorer = self._slot.model.scorer
        fresh_at = getattr(scorer, "fresh_at", None)
        self._metrics.embedding_age.set(time.time() - fresh_at if fresh_at else 0.0)
        event_at = getattr(scorer, "event_at", None)
        self._metrics.event_age.set(time.time() - event_at if event_at else 0.0)
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _count_tables(self) -> None:
        """Update the metrics of tables on SSD, which count lookups themselves."""
        model = self._slot.model
        counts = cache_counts(model.scorer)
        if counts is None:
            return
        lookups, hits, cache_bytes = counts
        before = self._tables if self._tables[0] == model.key else (model.key, 0, 0)  # another artifact counts from 0
        self._metrics.table_lookups.inc(lookups - before[1])
        self._metrics.table_hits.inc(hits - before[2])
        self._metrics.cache_bytes.set(cache_bytes)
        self._tables = (model.key, lookups, hits)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi_page(self._slot.model.scorer, self._limits))

    async def docs(self, request: Request) -> Response:
        page = docs_page(self._slot.model.scorer, self._limits, str(request.base_url).rstrip("/"))
        return HTMLResponse(page, headers=PAGE_HEADERS)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return problem(404, f"there is no {request.url.path}; /docs lists what there is")
        return problem(error.status_code, error.detail, dict(error.headers or {}))


def _wanted(request: Request, kind: str) -> str:
    """Return True if the response should be Arrow: it was requested, or was sent and any type is accepted."""
    accept = request.headers.get("accept", "*/*")
    return ARROW_TYPE if ARROW_TYPE in accept or (kind == ARROW_TYPE and "*/*" in accept) else JSON_TYPE


def _answer(scorer: Scorer, scored: Scores, kind: str) -> Response:
    if len(scored.refused) == len(scored.scores) > 0:
        return _all_refused(scored, "no row can be scored")
    headers = {"X-Artifact-Version": scored.version}
    is_bad, names = ~has_scores(scored.scores), score_columns(scorer.tasks)
    scores = scored.scores.reshape(len(scored.scores), len(names))
    if kind == ARROW_TYPE:
        reasons = {row.row: row.reason for row in scored.refused}
        columns = {
            **{name: pa.array(scores[:, i], mask=is_bad) for i, name in enumerate(names)},
            "reason": pa.array([reasons.get(row) for row in range(len(scored.scores))], pa.string()),
        }
        table = pa.table(columns).replace_schema_metadata({"artifact": scored.version})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return Response(sink.getvalue().to_pybytes(), headers=headers, media_type=ARROW_TYPE)
    values: list[list[float | None]] = scores.T.tolist()
    for row in np.flatnonzero(is_bad):
        for of_task in values:
            of_task[row] = None
    by_name = {task.name: of_task for task, of_task in zip(scorer.tasks, values, strict=False)}
    bad_rows = [row.as_dict() for row in scored.refused]
    body = {"artifact": scored.version, "scores": by_name or values[0], "bad_rows": bad_rows}
    return Response(msgspec.json.encode(body), headers=headers, media_type=JSON_TYPE)


def _all_refused(scored: Scores, what: str) -> Response:
    bad = [row.as_dict() for row in scored.refused]
    return problem(422, f"{what}; the first: {bad[0]['reason']}", None, bad_rows=bad)


def problem(status: int, message: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    return JSONResponse({"error": message, **more}, status, headers)


class _Watched:
    """Counts and times every request, refuses those that are not accepted, and answers errors with 500."""

    def __init__(
        self,
        app: ASGIApp,
        score: Callable[[Request], Awaitable[Response]],
        metrics: ServerMetrics,
        routes: list[Route],
        admission: Admission,
    ) -> None:
        self._app, self._score, self._metrics = app, score, metrics
        self._known_paths, self._admission = frozenset(route.path for route in routes), admission
        self._path_of: dict[Any, str] = {route.endpoint: route.path for route in reversed(routes) if "{" in route.path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                await send(message)
            except RuntimeError as error:
                if HUNG_UP not in str(error):
                    raise
                raise ConnectionResetError(str(error)) from error

        try:
            if refusal := await self._admission.refusal(scope):
                await problem(refusal.status, refusal.message, refusal.headers)(scope, receive, note)
            elif scope["path"] in (SCORE, RETRIEVE) and scope["method"] == "POST":
                # Past middleware and routes, which would cost as much as all else here.
                response = await self._score(Request(scope, receive))
                await response(scope, receive, note)
            else:
                await self._app(scope, receive, note)
        except (ClientDisconnect, ConnectionError):  # nobody is left to answer
            status = status or CLIENT_GONE
        except asyncio.CancelledError:  # server.drain_s is over, and the request is still not all there, or not scored
            if not status:
                await problem(503, "this server ends: send the request to another")(scope, receive, note)
        except Exception:
            logger.exception("a request failed")
            if not status:
                await problem(500, "something is wrong with this server; its log says what")(scope, receive, note)
        finally:
            path = scope["path"]
            if path not in self._known_paths:
                path = self._path_of.get(scope.get("endpoint"), "other")
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.request_seconds.labels(path).observe(time.monotonic() - started)


LINGER_S = 1.0  # a client that is still sending does not look at an answer: what it sends is dropped so long


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """Return the body. Raises BadRequest if it is too large, too slow, encoded, or cut off."""
    if encoding := request.headers.get("content-encoding"):
        raise BadRequest(415, f"Content-Encoding {encoding!r} is not read: send the body as it is")
    too_large = BadRequest(413, f"the body has more than {limits.body_bytes} bytes: send its rows in several requests")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > limits.body_bytes:
        if "expect" not in request.headers:  # else nothing is sent before it is asked for
            await _drop_rest(request)
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    break
                chunks.append(chunk)
    except TimeoutError:
        raise BadRequest(408, f"no whole body within {limits.body_timeout_s:g} s") from None
    except ClientDisconnect:
        raise BadRequest(400, "the client went away before its body was read") from None
    if size > limits.body_bytes:
        await _drop_rest(request)
        raise too_large
    return b"".join(chunks)


async def _drop_rest(request: Request) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await request.receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
