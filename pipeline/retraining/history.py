"""Turn the ledger's newest records into what a new window's data are compared with."""

from __future__ import annotations

from pipeline.retraining.ledger import ADDED, MAX_READ, PROMOTED, REJECTED, Ledger
from pipeline.retraining.statistics import WindowStatistics


def accepted_statistics(ledger: Ledger, most: int) -> list[tuple[str, WindowStatistics]]:
    """(window, statistics) of windows whose data were accepted, newest first, whatever came of their challengers."""
    found: list[tuple[str, WindowStatistics]] = []
    for record, _ in zip(ledger.newest(), range(MAX_READ), strict=False):
        if record.state in (PROMOTED, REJECTED) and record.data.get("accepted"):
            found.append((record.window, WindowStatistics.of(record.data["statistics"])))
            if len(found) == most:
                break
    return found


def windows_since(ledger: Ledger, version: str) -> int:
    """How many windows with good data came after the one that made `version`, which it has not been trained on."""
    count = 0
    for record, _ in zip(ledger.newest(), range(MAX_READ), strict=False):
        if record.version == version and record.state in (PROMOTED, ADDED):
            break
        count += record.state in (PROMOTED, REJECTED) and bool(record.data.get("accepted"))
    return count
