"""docs/reference/features.md: each feature has a page, a test that exists, and a part that exists; each extra has a feature."""

from __future__ import annotations

import re

from tests.docs.pages import REPOSITORY

DOCS, EXTRAS = REPOSITORY / "docs" / "reference", REPOSITORY / "pipeline" / "extras"
ROW = re.compile(r"(?m)^\| (.+?) \| \[[\w-]+\]\((\S+)\) \| `(\S+?)::(\w+)` \| (\w+) \|$")
TEXT = (DOCS / "features.md").read_text()
ROWS = ROW.findall(TEXT)


def test_every_line_of_the_tables_is_a_feature() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| feature ")]
    assert len(lines) == len(ROWS) > 80


def test_each_feature_has_a_page_a_test_and_a_part() -> None:
    wrong = []
    for feature, page, file, test, part in ROWS:
        text = (REPOSITORY / file).read_text() if (REPOSITORY / file).is_file() else ""
        if not (DOCS / page).is_file():
            wrong.append(f"{feature}: there is no {page}")
        if not re.search(rf"(?m)^def {test}\(", text):
            wrong.append(f"{feature}: {file} has no {test}")
        if part != "core" and not (EXTRAS / part / "__init__.py").is_file():
            wrong.append(f"{feature}: there is no extra {part}")
    assert wrong == []


def test_every_extra_has_a_feature() -> None:
    extras = {folder.name for folder in EXTRAS.iterdir() if (folder / "__init__.py").is_file()}
    assert extras <= {part for *_, part in ROWS}
