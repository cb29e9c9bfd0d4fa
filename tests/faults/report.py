"""Turn what the campaign reached into the table of docs/do/reliability.md:  python -m tests.faults.report RECORDS PAGE"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.faults.catalogue import FAULTS

BEGIN, END = "<!-- faults: written by `make faults` -->", "<!-- end of faults -->"


def render(records: list[dict[str, Any]]) -> str:
    """One row a figure, in the catalogue's order; a fault without a figure is said to have none."""
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


def insert(page: str, table: str) -> str:
    """The page with the table between its two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no line {BEGIN!r} followed by {END!r}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(records_path: str, page_path: str) -> None:
    records = [json.loads(line) for line in Path(records_path).read_text().splitlines()]
    page = Path(page_path)
    page.write_text(insert(page.read_text(), render(records)))


if __name__ == "__main__":
    main(*sys.argv[1:])
