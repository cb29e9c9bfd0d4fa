"""Write docs/adr/README.md, the decisions by theme with their status:  python docs/write_adr_index.py

A decision is in force unless its line "Status:" says what replaced it. A new decision gets a theme in THEMES.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "adr"
THEMES = {
    "Data": (1, 5, 24, 25, 27, 31, 32, 35, 39, 53, 67),
    "Config, command line and structure": (2, 20, 21, 60, 64, 65, 66),
    "Tables and their optimizers": (3, 16, 17, 18, 26, 33, 36, 49, 55),
    "Planning and prediction": (6, 7, 34, 44, 46, 54, 61, 62),
    "Speed on CPUs": (19, 45, 48, 52, 56, 58, 59),
    "Checkpoints": (4, 8, 9, 10, 29, 37, 40, 51, 57, 63),
    "Retraining and streams": (13, 28, 42, 50),
    "Artifacts and serving": (14, 15, 22, 23, 30, 38, 47, 68, 69),
    "Clusters": (11, 12, 41, 43),
}
OTHER = "Other"
HEAD = """# Decisions

<!-- written by python docs/write_adr_index.py -->

Each page records one decision: the problem, the choice, and what it costs. A page whose decision was replaced stays, with a link to the
decision that replaced it.
"""


def render() -> str:
    theme_of = {number: theme for theme, numbers in THEMES.items() for number in numbers}
    by_theme: dict[str, list[str]] = {theme: [] for theme in (*THEMES, OTHER)}
    for file in sorted(FOLDER.glob("[0-9]*.md")):
        text = file.read_text()
        number, title = re.findall(r"^# (\d+)\. (.*)", text)[0]
        by_theme[theme_of.get(int(number), OTHER)].append(f"| [{number}]({file.name}) | {title} | {status_of(text)} |")
    tables = [
        f"\n## {theme}\n\n| # | decision | status |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        for theme, rows in by_theme.items()
        if rows
    ]
    return HEAD + "".join(tables)


def status_of(text: str) -> str:
    replaced = re.search(r"(?m)^Status: .*?(replaced (?:in part )?by \[?ADR \d+\]?(?:\([^)]*\))?)", text)
    return replaced[1] if replaced else "in force"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(render())
