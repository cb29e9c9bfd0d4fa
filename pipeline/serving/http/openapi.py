"""Describe requests and responses as OpenAPI, from an artifact's columns and the server's limits."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from pipeline import __version__
from pipeline.config.serving import LimitsConfig
from pipeline.runtime.pages.html import render
from pipeline.serving.http.request_rows import ARROW_TYPE, JSON_TYPE, USUAL_K
from pipeline.serving.scoring.scorer import Scorer, asked_columns, retrieves, tables_of

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
    path, post, title = ("/retrieve", _retrieve, "Items") if retrieves(scorer) else ("/score", _score, "Scores")
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": f"Artifact {scorer.version}"},
        "paths": {
            path: {"post": post(scorer, limits)},
            "/health": {"get": _plain("Which artifact serves, and whether requests are taken", JSON_TYPE, "503")},
            "/health/live": {"get": _plain("Whether the process answers at all", JSON_TYPE)},
            "/health/ready": {"get": _plain("Whether requests are taken", JSON_TYPE, "503")},
            "/metrics": {"get": _plain("Counts for Prometheus", "text/plain")},
        },
    }


def _object(properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _listed(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


BAD_ROWS = _listed(_object({"row": {"type": "integer"}, "reason": {"type": "string"}}, ("row", "reason")))
BINARY = {"schema": {"type": "string", "format": "binary", "description": "An Arrow IPC stream without compression"}}


def _retrieve(scorer: Scorer, limits: LimitsConfig) -> dict[str, Any]:
    ids = {"type": ["array", "null"], "items": {"type": ["string", "integer"]}, "maxItems": limits.filter_ids}
    body = _body(scorer, limits)
    body["properties"] |= {
        "k": {"type": "integer", "minimum": 1, "maximum": limits.k, "default": min(USUAL_K, limits.k)},
        "allowed": {**ids, "description": "Only these items; null: all"},
        "excluded": {**ids, "description": "None of these items"},
    }
    kinds = {"items": "string", "scores": "number"}
    lists = {name: _listed({"type": ["array", "null"], "items": {"type": kind}}) for name, kind in kinds.items()}
    about = "For each row items and their scores, the best first, at most k; null for one in bad_rows"
    return {
        "summary": "Find the items with the highest scores for raw rows of users",
        "operationId": "retrieve",
        **_exchange(body, lists, about, {}),
    }


def _score(scorer: Scorer, limits: LimitsConfig) -> dict[str, Any]:
    scores = _listed({"type": ["number", "null"]})
    if names := [task.name for task in scorer.tasks]:
        scores = _object(dict.fromkeys(names, scores), names)
    about = "A score for each row, in the order of the request; null for one in bad_rows"
    body = _body(scorer, limits)
    rows = body["properties"]["rows"]
    by_user = _object({"user": rows["items"], "items": {**rows, "minItems": 1}}, ["user", "items"])
    by_user |= {"additionalProperties": False, "description": "The rows of one user, whose columns are given once"}
    exchange = _exchange({"anyOf": [body, by_user]}, {"scores": scores}, about, {ARROW_TYPE: BINARY})
    return {"summary": "Score raw rows, or a user with items", "operationId": "score", **exchange}


def _exchange(body: dict[str, Any], answer: dict[str, Any], about: str, more: dict[str, Any]) -> dict[str, Any]:
    """Describe a request and its responses. more: content types in addition to JSON, for both directions."""
    answered = {"artifact": {"type": "string"}, **answer, "bad_rows": BAD_ROWS}
    error = {"schema": _object({"error": {"type": "string"}, "bad_rows": BAD_ROWS}, ["error"])}
    good = {"description": about, "content": {JSON_TYPE: {"schema": _object(answered, [*answered])}, **more}}
    bad = {status: {"description": why, "content": {JSON_TYPE: error}} for status, why in ERRORS.items()}
    content = {JSON_TYPE: {"schema": body}, **more}
    return {"requestBody": {"required": True, "content": content}, "responses": {"200": good, **bad}}


def _body(scorer: Scorer, limits: LimitsConfig) -> dict[str, Any]:
    columns, tables = asked_columns(scorer), tables_of(scorer)
    category = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]}
    kinds: dict[str, Any] = {name: {"type": ["number", "null"]} for name in columns.dense}
    kinds |= dict.fromkeys(columns.sparse, category)
    several = {**_listed(category), "maxItems": limits.values_per_cell}
    kinds |= {name: {"anyOf": [several, {"type": "null"}]} for name in columns.lists}
    number = {"type": "number"}
    kinds |= {
        name: {"anyOf": [{**_listed(number), "minItems": width, "maxItems": width}, {"type": "null"}]}
        for name, width in columns.vectors.items()
    }
    for name in columns.weighted:
        kinds[name]["description"] = "id:weight, split at the last colon; an id without a weight counts 1"
    for name in () if tables is None else tables.fillable(list(kinds)):
        kinds[name] = {**kinds[name], "description": "If it is left out, a feature table of the artifact may have it"}
    row = {"type": "object", "properties": kinds, "additionalProperties": False}
    rows = {**_listed(row), "maxItems": limits.rows}
    return {**_object({"rows": rows}, ["rows"]), "additionalProperties": False}


def _plain(about: str, kind: str, *errors: str) -> dict[str, Any]:
    content = {kind: {"schema": {"type": "object"} if kind == JSON_TYPE else {"type": "string"}}}
    answers = {"200": about, **dict.fromkeys(errors, "Not now")}
    responses = {status: {"description": text, "content": content} for status, text in answers.items()}
    return {"summary": about, "responses": responses}


STYLE = "pre { white-space: pre-wrap; overflow-wrap: anywhere; }\n"


def docs_page(scorer: Scorer, limits: LimitsConfig, address: str) -> str:
    """Return a page of documentation. `address` is the address that the reader's request was sent to."""
    page = openapi_page(scorer, limits)
    body: dict[str, Any] = {"rows": [example_row(scorer)]}
    path = next(iter(page["paths"]))
    if retrieves(scorer):
        body |= {"k": min(10, limits.k), "excluded": ["a"]}
    words = shlex.quote(json.dumps(body, ensure_ascii=False))
    columns = asked_columns(scorer)
    listed = {
        name: "list of id:weight" if name in columns.weighted else "list of text or numbers" for name in columns.lists
    }
    kinds = [
        *((name, "number") for name in columns.dense),
        *((name, "text, a number, true or false") for name in columns.sparse),
        *listed.items(),
        *((name, f"list of {width} numbers") for name, width in columns.vectors.items()),
    ]
    return render(
        "serving/http/docs.html", page["info"]["title"], css=STYLE, version=scorer.version, limits=limits,
        command=f"curl -H 'Content-Type: application/json' {address}{path} \\\n    -d {words}",
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
    """Return pairs (status, meaning); empty if the summary has the same text."""
    answers = [(status, answer["description"]) for status, answer in about["responses"].items()]
    return [] if [description for _, description in answers] == [about["summary"]] else answers
