"""Describe requests and answers as OpenAPI, by an artifact's columns and the server's limits."""

from __future__ import annotations

import json
import shlex
from typing import Any

from pipeline import __version__
from pipeline.config.serving import LimitsConfig
from pipeline.runtime.pages.html import render
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, USUAL_K
from pipeline.serving.scoring.scorer import Scorer, retrieves

ERRORS = {
    "400": "The body, or the request, is not what its Content-Type says",
    "401": "The server wants a token, and the request has none of its tokens",
    "408": "The body did not arrive in time",
    "413": "Too many bytes, or too many rows",
    "415": "A Content-Type or Content-Encoding that is not read",
    "422": "A column is unknown, a value has another type, or no row can be scored",
    "429": "More requests or connections of one client than the limits allow",
    "503": "Too much is waiting already, or the server is about to end; Retry-After says when to come again",
}


def openapi_page(scorer: Scorer, limits: LimitsConfig) -> dict[str, Any]:
    path, operation, title = ("/retrieve", _retrieve, "Items") if retrieves(scorer) else ("/score", _score, "Scores")
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": f"Artifact {scorer.version}"},
        "paths": {
            path: {"post": operation(scorer, limits)},
            "/health": {"get": _plain("Which artifact serves, and whether requests are taken", JSON_TYPE, "503")},
            "/health/live": {"get": _plain("Whether the process answers at all", JSON_TYPE)},
            "/health/ready": {"get": _plain("Whether requests are taken", JSON_TYPE, "503")},
            "/metrics": {"get": _plain("Counts for Prometheus", "text/plain")},
        },
    }


def _retrieve(scorer: Scorer, limits: LimitsConfig) -> dict[str, Any]:
    ids = {"type": ["array", "null"], "items": {"type": ["string", "integer"]}, "maxItems": limits.filter_ids}
    body = _body(scorer, limits)
    body["properties"] |= {
        "k": {"type": "integer", "minimum": 1, "maximum": limits.k, "default": min(USUAL_K, limits.k)},
        "allowed": {**ids, "description": "Only these items; null: all"},
        "excluded": {**ids, "description": "None of these items"},
    }
    lists = {name: {"type": ["array", "null"], "items": {"type": kind}} for name, kind in (("items", "string"), ("scores", "number"))}  # fmt: skip
    answer = {
        "type": "object",
        "properties": {
            "artifact": {"type": "string"},
            **{name: {"type": "array", "items": each} for name, each in lists.items()},
            "bad_rows": _bad_rows(),
        },
        "required": ["artifact", "items", "scores", "bad_rows"],
    }
    return {
        "summary": "Find the items with the highest scores for raw rows of users",
        "operationId": "retrieve",
        "requestBody": {"required": True, "content": {JSON_TYPE: {"schema": body}}},
        "responses": {
            "200": {
                "description": "For each row items and their scores, the best first, at most k; null for one in bad_rows",
                "content": {JSON_TYPE: {"schema": answer}},
            },
            **{status: _error(about) for status, about in ERRORS.items()},
        },
    }


def _score(scorer: Scorer, limits: LimitsConfig) -> dict[str, Any]:
    return {
        "summary": "Score raw rows",
        "operationId": "score",
        "requestBody": {
            "required": True,
            "content": {JSON_TYPE: {"schema": _body(scorer, limits)}, ARROW_TYPE: {"schema": _binary()}},
        },
        "responses": {
            "200": {
                "description": "A score for each row, in the order of the request; null for one in bad_rows",
                "content": {JSON_TYPE: {"schema": _answer(scorer)}, ARROW_TYPE: {"schema": _binary()}},
            },
            **{status: _error(about) for status, about in ERRORS.items()},
        },
    }


def _body(scorer: Scorer, limits: LimitsConfig) -> dict[str, Any]:
    columns = scorer.columns
    category = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    kinds: dict[str, Any] = {name: {"type": ["number", "null"]} for name in columns.dense}
    kinds |= dict.fromkeys(columns.sparse, category)
    several = {"type": "array", "items": category, "maxItems": limits.values_per_cell}
    kinds |= {name: {"anyOf": [several, {"type": "null"}]} for name in columns.lists}
    for name in columns.weighted:
        kinds[name]["description"] = "id:weight, split at the last colon; an id without a weight counts 1"
    row = {"type": "object", "properties": kinds, "additionalProperties": False}
    rows = {"type": "array", "items": row, "maxItems": limits.rows}
    return {"type": "object", "properties": {"rows": rows}, "required": ["rows"], "additionalProperties": False}


def _binary() -> dict[str, Any]:
    return {"type": "string", "format": "binary", "description": "An Arrow IPC stream without compression"}


def _bad_rows() -> dict[str, Any]:
    bad = {
        "type": "object",
        "properties": {"row": {"type": "integer"}, "reason": {"type": "string"}},
        "required": ["row", "reason"],
    }
    return {"type": "array", "items": bad}


def _answer(scorer: Scorer) -> dict[str, Any]:
    scores: dict[str, Any] = {"type": "array", "items": {"type": ["number", "null"]}}
    if names := [task.name for task in scorer.tasks]:
        scores = {"type": "object", "properties": dict.fromkeys(names, scores), "required": names}
    return {
        "type": "object",
        "properties": {
            "artifact": {"type": "string"},
            "scores": scores,
            "bad_rows": _bad_rows(),
        },
        "required": ["artifact", "scores", "bad_rows"],
    }


def _error(about: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"error": {"type": "string"}, "bad_rows": _bad_rows()},
        "required": ["error"],
    }
    return {"description": about, "content": {JSON_TYPE: {"schema": schema}}}


def _plain(about: str, kind: str, *errors: str) -> dict[str, Any]:
    schema = {"type": "object"} if kind == JSON_TYPE else {"type": "string"}
    answers: dict[str, Any] = {"200": {"description": about, "content": {kind: {"schema": schema}}}}
    answers |= {status: {"description": "Not now", "content": {kind: {"schema": schema}}} for status in errors}
    return {"summary": about, "responses": answers}


STYLE = "pre { white-space: pre-wrap; overflow-wrap: anywhere; }\n"


def docs_page(scorer: Scorer, limits: LimitsConfig, address: str) -> str:
    """`address` is what the reader's own request went to."""
    page = openapi_page(scorer, limits)
    row = example_row(scorer)
    path, title = ("/retrieve", "Items") if retrieves(scorer) else ("/score", "Scores")
    body: dict[str, Any] = (
        {"rows": [row], "k": min(10, limits.k), "excluded": ["a"]} if retrieves(scorer) else {"rows": [row]}
    )
    command = f"curl -H 'Content-Type: application/json' {address}{path} \\\n    -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    columns = scorer.columns
    kinds = [
        *((name, "number") for name in columns.dense),
        *((name, "text, a number, true or false") for name in columns.sparse),
    ]
    kinds += [
        (name, "list of id:weight" if name in columns.weighted else "list of text or numbers") for name in columns.lists
    ]
    return render(
        "serving/http/docs.html", title, css=STYLE, version=scorer.version, command=command, limits=limits,
        operations=[
            (f"{method.upper()} {path}", about["summary"], _answers(about))
            for path, methods in page["paths"].items()
            for method, about in methods.items()
        ],
        columns=kinds,
    )  # fmt: skip


def example_row(scorer: Scorer) -> dict[str, Any]:
    columns = scorer.columns
    return {
        **dict.fromkeys(columns.dense[:2], 1.0),
        **dict.fromkeys(columns.sparse[:2], "a"),
        **{name: ["a:0.5", "b"] if name in columns.weighted else ["a", "b"] for name in columns.multi_hot[:1]},
    }


def _answers(about: dict[str, Any]) -> list[tuple[str, str]]:
    """(status, meaning); none if the summary says the same."""
    answers = [(status, answer["description"]) for status, answer in about["responses"].items()]
    return [] if [description for _, description in answers] == [about["summary"]] else answers
