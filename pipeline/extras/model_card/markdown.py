"""Show a model card as sections with tables: as Markdown, and on the registry's page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.extras.model_card.card import Metric, ModelCard, Since
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.masking import one_line

UNKNOWN = "not known"
MAX_SOURCES = 20


@dataclass(frozen=True)
class Section:
    """A part of the card: a table, a list, or both. numbers: the columns of the table that are numbers."""

    title: str
    headings: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    numbers: range = range(0)


def sections(card: ModelCard) -> list[Section]:
    """Return the sections of the card, in the order in which they are read."""
    about = {
        "artifact": card.artifact,
        "model": card.model,
        "labels": card.labels and ", ".join(f"{each.name or 'unnamed'} ({each.kind})" for each in card.labels),
        "licence": card.license,
        "contact": card.contact,
        "intended use": card.intended_use,
        "tables": ", ".join(f"{count} in {name}" for name, count in card.tables.items()) or "none",
        "rows of tables": f"{card.num_rows:,}",
        "layers": card.layers,
        "size": show_size(card.size_bytes),
        "calibration": card.calibration,
    }
    parts = [
        Section("About", ["what", "value"], _pairs(about)),
        *_data(card),
        _metrics(card.metrics),
        Section(
            "The artifact compared with the trained model",
            ["split", *(names := list(dict.fromkeys(name for each in card.parity.values() for name in each)))],
            [[split, *(_number(each.get(name)) for name in names)] for split, each in card.parity.items()],
            numbers=range(1, 1 + len(names)),
        ),
        Section("Limits", lines=card.limits),
        _since(card.since),
        Section("Lineage", ["what", "value"], _pairs(card.lineage)),
    ]
    return [part for part in parts if part.rows or part.lines]


def to_markdown(card: ModelCard) -> str:
    lines = [f"# Model card of {_cell(card.name or card.artifact)}", ""]
    for part in sections(card):
        lines += [f"## {part.title}", ""]
        if part.rows:
            lines += [_row(part.headings), _row(["---"] * len(part.headings)), *map(_row, part.rows), ""]
        if part.lines:
            lines += [*(f"- {_cell(line)}" for line in part.lines), ""]
    return "\n".join(lines)


def _data(card: ModelCard) -> list[Section]:
    data = card.data
    rows = None if data.quarantined_rows is None else f"{data.quarantined_rows:,}"
    about = {"data set": data.name, "SHA-256": data.sha256, "window": data.window, "rows in quarantine": rows}
    parts = [Section("Data", ["what", "value"], _pairs(about))]
    if data.splits is None:
        parts.append(Section("Rows", lines=["The rows of each split are not known."]))
    else:
        of_splits = [[name, f"{each.rows:,}", _number(each.label_rate)] for name, each in data.splits.items()]
        parts.append(Section("Rows", ["split", "rows", "label rate"], of_splits, numbers=range(1, 3)))
    if data.sources is None:
        return [*parts, Section("Sources", lines=["The source files are not known."])]
    files = [
        [each.name, *(UNKNOWN if number is None else f"{number:,}" for number in (each.rows, each.size_bytes)),
         each.sha256 or UNKNOWN]
        for each in data.sources[:MAX_SOURCES]
    ]  # fmt: skip
    more = len(data.sources) - MAX_SOURCES
    lines = [f"and {more:,} more files, which card.json lists"] if more > 0 else []
    return [*parts, Section("Sources", ["file", "rows", "bytes", "SHA-256"], files, lines, range(1, 3))]


def _metrics(metrics: list[Metric]) -> Section:
    """Return a row for each split, label and slice, with a column for each metric."""
    if not metrics:
        return Section("Metrics", lines=["No metrics are known."])
    names = list(dict.fromkeys(each.name for each in metrics))
    found: dict[tuple[str, str | None, str | None], dict[str, Metric]] = {}
    for each in metrics:
        found.setdefault((each.split, each.label, each.slice), {})[each.name] = each
    rows = []
    for (split, label, part), by_name in found.items():
        shown = [_estimate(by_name[name]) if name in by_name else "" for name in names]
        counted = max(each.rows for each in by_name.values())
        rows.append([split, label or "", part or "all rows", f"{counted:,}", *shown])
    note = "Intervals hold with 95 % confidence over rows. A number without an interval has an unknown one."
    headings = ["split", "label", "slice", "rows", *names]
    return Section("Metrics", headings, rows, [note], range(3, len(headings)))


def _estimate(metric: Metric) -> str:
    if metric.low is None or metric.high is None:
        return _number(metric.value)
    return f"{_number(metric.value)} ({metric.low:.4f} to {metric.high:.4f})"


def _since(since: Since | None) -> Section:
    title = "Since the export"
    if since is None:
        line = (
            "This file states what was known at the export. Deltas change what servers score later: "
            "`python -m pipeline card artifact=FOLDER` shows the newest delta."
        )
        return Section(title, lines=[line])
    lines = []
    if since.newest_delta == 0:
        lines.append("No delta was published: everything above is about what serves.")
    elif since.newest_delta is None:
        lines.append("Whether there are deltas is not known.")
    else:
        lines.append(
            f"Everything above is older than what serves by {since.newest_delta:,} deltas. The newest delta has step "
            f"{since.delta_step}, and NE {_number(since.delta_ne)} on the validation rows of its gate."
        )
    if since.version is not None:
        about = {
            "registry's version": since.version + (" (champion)" if since.is_champion else ""),
            "window": since.window,
            "parent": since.parent or "none",
            "judged on": since.judged_on,
            "NE when judged": None if since.ne_when_judged is None else _number(since.ne_when_judged),
        }
        return Section(title, ["what", "value"], _pairs(about), lines)
    return Section(title, lines=lines)


def _pairs(values: Mapping[str, object]) -> list[list[str]]:
    return [[name.replace("_", " "), UNKNOWN if value in (None, "") else str(value)] for name, value in values.items()]


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if isinstance(value, int) or (value.is_integer() and value > 1):  # a count may be stored as float
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.001 or not value else f"{value:.2g}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Return text that neither ends a table's cell nor becomes HTML."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")
