"""Show a registry as an HTML page: which versions were champion and when, and how challengers
compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.config.registry import if_installed
from pipeline.extras.pages.charts import Line, line_chart
from pipeline.retraining.ledger import ADDED, PROMOTED, REJECTED, ROLLED_BACK, Ledger, Record, name_of_ne
from pipeline.retraining.registry import Pointer, Registry
from pipeline.runtime.errors import UserError
from pipeline.runtime.pages.html import fixed, render

MAX_RECORDS = 500  # the newest records shown on the page
MAX_CHAMPIONS = 100
MAX_CARDS = 10  # the newest versions whose model cards are shown
CROWNING = (PROMOTED, ADDED, ROLLED_BACK)  # records by which a version becomes champion


@dataclass(frozen=True)
class Reign:
    """The time in which a version was champion. `until` is empty for the current champion."""

    version: str
    since: str
    until: str
    how: Record


def render_registry(registry: Registry, ledger: Ledger) -> str:
    """Return a page of the newest MAX_RECORDS records. Raises RegistryError and DamagedError as the registry."""
    records = [record for record, _ in zip(ledger.newest(), range(MAX_RECORDS), strict=False)][::-1]
    pointer, names, found = registry.pointer(), registry.names(), reigns(records)
    values: dict[str, Any] = {
        "charts": _charts(records),
        "champions": [_champion(registry, each, names) for each in reversed(found[-MAX_CHAMPIONS:])],
        "history": [_decision(record) for record in reversed(records)],
        "model_cards": list(_model_cards(registry, reversed(names[-MAX_CARDS:]))),
    }
    if pointer is not None:
        cards = _cards(pointer, names, records, found) + _canary(registry)
        values |= {"cards": cards, "warnings": _warnings(pointer, records)}
    return render(
        "extras/pages/registry.html", f"Registry {registry.path}", registry=registry, pointer=pointer, **values
    )


def reigns(records: Sequence[Record]) -> list[Reign]:
    """Return the reigns, oldest first. `records` are in ascending order."""
    crowned = [record for record in records if record.state in CROWNING and record.version]
    ends = [record.time for record in crowned[1:]] + [""]
    return [Reign(record.version, record.time, end, record) for record, end in zip(crowned, ends, strict=False)]


def _cards(
    pointer: Pointer, names: list[str], records: Sequence[Record], found: Sequence[Reign]
) -> list[tuple[str, str]]:
    """Return pairs of a large figure and its description."""
    counts = Counter(record.state for record in records)
    made = next((each.how for each in reversed(found) if each.version == pointer.version and each.how.metrics), None)
    cards = [(pointer.version, f"champion; before it {pointer.previous or 'none'}")]
    if made is not None and (ne := made.metrics.get("challenger_ne", made.metrics.get("ne"))) is not None:
        cards.append(
            (f"{ne:.4f}", f"its {name_of_ne(made.metrics)} on {made.metrics.get('judged_on') or 'validation'}")
        )
    if made is not None and "ne_ratio" in made.metrics:
        cards.append((f"{100 * (made.metrics['ne_ratio'] - 1):+.2f} %", "NE to that of the champion before it"))
    cards.append((f"{counts[PROMOTED]} of {counts[PROMOTED] + counts[REJECTED]}", "challengers promoted"))
    return [*cards, (str(len(names)), "versions kept")]


def _canary(registry: Registry) -> list[tuple[str, str]]:
    """Return the card of the running canary, if there is one."""
    canary_card = if_installed("canary_card")
    card = None if canary_card is None else canary_card(registry.path)
    return [] if card is None else [card]


def _warnings(pointer: Pointer, records: Sequence[Record]) -> list[str]:
    found = []
    if pointer.pinned:
        reason = pointer.reason or "no reason given"
        found.append(f"{pointer.version} is pinned ({reason}): nothing is promoted until `registry unpin`.")
    states = [record.state for record in records if record.state in (PROMOTED, REJECTED)]
    rejected = len(states) - 1 - max((at for at, state in enumerate(states) if state == PROMOTED), default=-1)
    return [*found, f"The last {rejected} challengers were rejected."] if rejected >= 3 else found


def _charts(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return (caption, chart) pairs. Charts without a point are left out."""

    def points(name: str, state: str = "") -> list[tuple[float, float]]:
        chosen = [each for each in records if each.metrics.get(name) is not None and state in ("", each.state)]
        return [(float(record.number), float(record.metrics[name])) for record in chosen]

    found = []
    for title, metric in (("NE on the window that judged", "ne"), ("Calibration (1 is best)", "calibration")):
        challenger = f"challenger_{metric}"
        lines = [
            Line("champion", "validation", points(f"champion_{metric}"), marks=True),
            Line("promoted challenger", "good", points(challenger, PROMOTED), marks=True, joined=False),
            Line("rejected challenger", "bad", points(challenger, REJECTED), marks=True, joined=False),
        ]
        found.append((title, line_chart(f"{title} of each challenger", metric, lines, "record")))
    minutes = [(float(record.number), record.seconds / 60) for record in records if record.seconds]
    lines = [Line("tick", "train", minutes, marks=True)]
    found.append(("Minutes a window took", line_chart("minutes of each tick", "minutes", lines, "record")))
    for key, what in (("training_price", "price"), ("training_rank_hours", "rank-hours")):
        if costs := [(float(each.number), float(each.metrics[key])) for each in records if key in each.metrics]:
            lines = [Line("tick", "train", costs, marks=True)]
            found.append((f"What a training cost ({what})", line_chart(f"{what} of each tick", what, lines, "record")))
            break
    return [(title, chart) for title, chart in found if chart]


def _champion(registry: Registry, reign: Reign, names: list[str]) -> list[str]:
    how = reign.how
    return [
        reign.version, reign.since, reign.until or "now", how.state.replace("_", " "), how.window or "-", how.parent or "-",
        fixed(how.metrics.get("challenger_ne")), fixed(how.metrics.get("champion_ne")),
        _size(registry, reign.version) if reign.version in names else "removed",
    ]  # fmt: skip


def _model_cards(registry: Registry, names: Iterable[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the version and the sections of its model card, for each version with an artifact."""
    card_of_artifact, sections = if_installed("card_of_artifact"), if_installed("card_sections")
    if card_of_artifact is None:
        return
    for name in names:
        with suppress(UserError):  # the table says that the version is damaged
            artifact = registry.version(name).artifact
            if artifact is not None:
                yield name, sections(card_of_artifact(artifact))


def _size(registry: Registry, name: str) -> str:
    try:
        return f"{registry.version(name).size_bytes / 2**20:,.1f}"
    except UserError:
        return "damaged"


def _decision(record: Record) -> list[str]:
    return [
        str(record.number), record.time, record.state.replace("_", " "), record.window or "-", record.version or "-",
        fixed(record.metrics.get("challenger_ne")), fixed(record.metrics.get("champion_ne")), "; ".join(record.reasons),
    ]  # fmt: skip
