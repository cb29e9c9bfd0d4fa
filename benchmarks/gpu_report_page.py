"""Render the record of benchmarks.gpu_report as one page that opens from disk."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from pipeline.runtime.pages.html import cards, document, table

MARKS = {True: "passed", False: "FAILED", None: "not tried"}


def render(report: dict[str, Any]) -> str:
    """`report`: {"about": ..., "sections": [...]}, as gpu_report.json holds it."""
    about, sections = report["about"], report["sections"]
    checks = [check for section in sections for check in section["checks"]]
    counts = [sum(check["passed"] is kind for check in checks) for kind in MARKS]
    failed = counts[1] + sum(bool(section["error"]) for section in sections)
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gb']} GiB)" for gpu in about["gpus"])
    kind = "shadow GPUs: its times mean nothing" if about["shadow"] else "GPUs"
    minutes = sum(section["seconds"] for section in sections) / 60
    body = [
        "<h1>GPU report</h1>",
        f"<p>{escape(gpus)}. This report was made on {kind}.</p>",
        cards(
            [
                (str(counts[0]), "checks passed"),
                (str(failed), "failed"),
                (str(counts[2]), "not tried"),
                (f"{minutes:.1f}", "minutes"),
            ]
        ),
    ]
    for section in sections:
        body += _section(section)
    rows = [[key, str(value)] for key, value in about.items() if key != "gpus"]
    body += ["<h2>Machine and versions</h2>", table(("", "value"), rows, label="machine")]
    return document("GPU report", body)


def _section(section: dict[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(section['title'])}</h2>"
    if section["error"]:
        yield f'<ul class="notes"><li>{escape(section["error"])}</li></ul>'
    if section["checks"]:
        rows = [[c["name"], MARKS[c["passed"]], c["found"], c["wanted"]] for c in section["checks"]]
        yield table(("check", "result", "found", "wanted"), rows, label=section["title"])
    if section["name"] == "speed":
        for ranks, presets in section["figures"].items():
            if ranks != "predicted_step_ms":
                yield _speeds(ranks, presets)


def _speeds(ranks: str, presets: dict[str, Any]) -> str:
    headings = ("preset", "loop", "ms a step", "least", "most", "samples/s")
    rows = [
        [
            name,
            side,
            f"{ms:.2f}",
            *(f"{each:.2f}" for each in one["spread_ms"][side]),
            f"{one['samples_per_s'][side]:,.0f}",
        ]
        for name, one in presets.items()
        for side, ms in one["ms_a_step"].items()
    ]
    return f"<h3>{escape(ranks)}</h3>" + table(headings, rows, range(2, 6), f"speed on {ranks}")
