"""Render the OpenAPI description as a page for people, with nothing fetched from elsewhere."""

from __future__ import annotations

import html
import json
import shlex
from typing import Any

from pipeline.config.server import LimitsConfig
from pipeline.runtime.pages.html import document, table
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
    parts = [
        f"<h1>{title}</h1>",
        f'<p>Artifact {html.escape(scorer.version)}. <a href="openapi.json">openapi.json</a> says the same to machines.</p>',
        f"<pre>{html.escape(command)}</pre>",
        f"<p>At most {limits.rows:,} rows and {limits.body_bytes:,} bytes a request. A column may be null, or left out.</p>",
        *(
            _operation(path, method, about)
            for path, methods in page["paths"].items()
            for method, about in methods.items()
        ),
        "<h2>Columns</h2>",
        table(("column", "takes"), kinds, (), "columns"),
    ]
    return document(title, parts, STYLE)


def example_row(scorer: Scorer) -> dict[str, Any]:
    columns = scorer.columns
    return {
        **dict.fromkeys(columns.dense[:2], 1.0),
        **dict.fromkeys(columns.sparse[:2], "a"),
        **{name: ["a:0.5", "b"] if name in columns.weighted else ["a", "b"] for name in columns.multi_hot[:1]},
    }


def _operation(path: str, method: str, about: dict[str, Any]) -> str:
    answers = [(status, answer["description"]) for status, answer in about["responses"].items()]
    is_said = [description for _, description in answers] == [about["summary"]]
    listed = "" if is_said else table(("status", "meaning"), answers, (), f"answers of {path}")
    return f"<h2>{method.upper()} {path}</h2><p>{html.escape(about['summary'])}</p>{listed}"
