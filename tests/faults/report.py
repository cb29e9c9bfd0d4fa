"""Turn the results of the campaign into the table of docs/measurements/faults.md."""

from __future__ import annotations

from typing import Any

from tests.faults.catalogue import FAULTS


def render(records: list[dict[str, Any]]) -> str:
    """Return a row for each result, in the catalogue's order. A fault without a result is marked."""
    lines = ["| # | fault | planted | what happened | seed | seconds | date |", "|---|---|---|---|---|---|---|"]
    for number, title in FAULTS.items():
        mine = [record for record in records if record["number"] == number]
        for record in mine:
            seed = "" if record["seed"] is None else record["seed"]
            lines.append(
                f"| {number} | {title} | {record['count']:,} | {record['figure']} | {seed} | {record['seconds']} | {record['date']} |"
            )
        if not mine:
            lines.append(f"| {number} | {title} | | **no test passed** | | | |")
    return "\n".join(lines)
