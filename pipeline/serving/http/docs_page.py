"""Render the OpenAPI description as a page for people, with nothing fetched from elsewhere."""

from __future__ import annotations

import json
import shlex
from typing import Any

from pipeline.config.serving import LimitsConfig
from pipeline.runtime.pages.html import render
from pipeline.serving.http.openapi import openapi_page
from pipeline.serving.scoring.scorer import Scorer, retrieves

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
