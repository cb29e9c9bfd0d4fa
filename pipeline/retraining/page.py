"""Show a registry as an HTML page that opens from disk: who was champion when, how challengers compared, and what was decided why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pipeline.retraining.ledger import ADDED, PROMOTED, REJECTED, ROLLED_BACK, Ledger, Record
from pipeline.retraining.registry import Pointer, Registry
from pipeline.runtime.errors import UserError
from pipeline.runtime.pages.charts import Line, line_chart
from pipeline.runtime.pages.html import cards, document, figure, legend, table

MOST_RECORDS = 500  # the newest, on the page
MOST_CHAMPIONS = 100
CROWNING = (PROMOTED, ADDED, ROLLED_BACK)  # records with which a version becomes champion
COLOURS = {"good": "promoted", "bad": "rejected", "validation": "the champion that it was held against"}
CHARTS = (("NE on the window that judged", "ne"), ("Calibration (1 is best)", "calibration"))


@dataclass(frozen=True)
class Reign:
    """The time in which a version was champion; until is empty for the one that is."""

    version: str
    since: str
    until: str
    how: Record


def render_registry(registry: Registry, ledger: Ledger) -> str:
    """Of the newest MOST_RECORDS records. Raises RegistryError and DamagedError as the registry does."""
    records = [record for record, _ in zip(ledger.newest(), range(MOST_RECORDS), strict=False)][::-1]
    pointer, names = registry.pointer(), registry.names()
    found = reigns(records)
    sections = (
        _heading(registry, pointer, names, records, found),
        _charts(records),
        _champions(registry, found, names),
        _history(records),
    )
    return document(f"Registry {registry.path}", [part for section in sections for part in section])  # fmt: skip


def reigns(records: Sequence[Record]) -> list[Reign]:
    """Oldest first; `records` ascend."""
    crowned = [record for record in records if record.state in CROWNING and record.version]
    ends = [record.time for record in crowned[1:]] + [""]
    return [Reign(record.version, record.time, end, record) for record, end in zip(crowned, ends, strict=False)]


def _heading(
    registry: Registry, pointer: Pointer | None, names: list[str], records: Sequence[Record], found: Sequence[Reign]
) -> Iterator[str]:
    yield f"<h1>{escape(registry.path)}</h1>"
    if pointer is None:
        yield "<p>It has no champion yet.</p>"
        return
    yield f"<p>{escape(pointer.version)} is champion since {escape(pointer.promoted_at)}.</p>"
    counts = Counter(record.state for record in records)
    made = next((each.how for each in reversed(found) if each.version == pointer.version and each.how.metrics), None)
    entries = [(pointer.version, f"champion; before it {pointer.previous or 'none'}")]
    if made is not None and (ne := made.metrics.get("challenger_ne", made.metrics.get("ne"))) is not None:
        entries.append((f"{ne:.4f}", f"its NE on {made.metrics.get('judged_on') or 'validation'}"))
    if made is not None and "ne_ratio" in made.metrics:
        entries.append((f"{100 * (made.metrics['ne_ratio'] - 1):+.2f} %", "NE to that of the champion before it"))
    entries.append((f"{counts[PROMOTED]} of {counts[PROMOTED] + counts[REJECTED]}", "challengers promoted"))
    entries.append((str(len(names)), "versions kept"))
    yield cards(entries)
    notes = []
    if pointer.pinned:
        notes.append(
            f"{pointer.version} is pinned ({pointer.reason or 'no reason given'}): nothing is promoted until `registry unpin`."
        )
    since = [record.state for record in records if record.state in (PROMOTED, REJECTED)]
    rejected = len(since) - 1 - max((at for at, state in enumerate(since) if state == PROMOTED), default=-1)
    if rejected >= 3:
        notes.append(f"The last {rejected} challengers were rejected.")
    if notes:
        yield f'<ul class="notes" aria-label="warnings">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>'


def _charts(records: Sequence[Record]) -> Iterator[str]:
    drawn = []
    for title, metric in CHARTS:

        def points(who: str, state: str = "", metric: str = metric) -> list[tuple[float, float]]:
            name = f"{who}_{metric}"
            return [(float(record.number), float(record.metrics[name])) for record in records
                    if record.metrics.get(name) is not None and state in ("", record.state)]  # fmt: skip

        lines = [
            Line("champion", "validation", points("champion"), marks=True),
            Line("promoted challenger", "good", points("challenger", PROMOTED), marks=True, joined=False),
            Line("rejected challenger", "bad", points("challenger", REJECTED), marks=True, joined=False),
        ]
        if chart := line_chart(f"{title} of each challenger", metric, lines, "record"):
            drawn.append(figure(title, chart))
    seconds = [(float(record.number), record.seconds / 60) for record in records if record.seconds]
    if chart := line_chart("minutes of each tick", "minutes", [Line("tick", "train", seconds, marks=True)], "record"):
        drawn.append(figure("Minutes a window took", chart))
    if drawn:
        yield "<h2>Challengers</h2>"
        yield legend(COLOURS.items())
        yield f'<div class="charts">{"".join(drawn)}</div>'


def _champions(registry: Registry, found: Sequence[Reign], names: list[str]) -> Iterator[str]:
    rows = [
        [
            each.version, each.since, each.until or "now", each.how.state.replace("_", " "), each.how.window or "-", each.how.parent or "-",
            _shown(each.how, "challenger_ne"), _shown(each.how, "champion_ne"),
            _size(registry, each.version) if each.version in names else "removed",
        ]
        for each in reversed(found[-MOST_CHAMPIONS:])
    ]  # fmt: skip
    if rows:
        yield "<h2>Champions</h2>"
        headings = (
            "version",
            "since, UTC",
            "until",
            "how",
            "window",
            "parent",
            "NE",
            "NE of the one before",
            "size, MiB",
        )
        yield table(headings, rows, (6, 7, 8), "champions")


def _size(registry: Registry, name: str) -> str:
    try:
        return f"{registry.version(name).size_bytes / 2**20:,.1f}"
    except UserError:
        return "damaged"


def _history(records: Sequence[Record]) -> Iterator[str]:
    rows = [
        [
            str(record.number), record.time, record.state.replace("_", " "), record.window or "-", record.version or "-",
            _shown(record, "challenger_ne"), _shown(record, "champion_ne"), "; ".join(record.reasons),
        ]
        for record in reversed(records)
    ]  # fmt: skip
    if rows:
        yield "<h2>What was decided, and why</h2>"
        yield table(
            ("record", "time, UTC", "state", "window", "version", "NE", "champion's NE", "reasons"),
            rows,
            (0, 5, 6),
            "history",
        )


def _shown(record: Record, metric: str) -> str:
    value = record.metrics.get(metric)
    return "-" if value is None else f"{value:.4f}"
