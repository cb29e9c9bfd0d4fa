"""Pages are free of the phrases that readers from elsewhere do not know, and the code has no more of them than it had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY, name_of
from tests.docs.plain import PHRASES, comments_and_docstrings, count, pages, per_thousand_lines, prose

# Records of tests that no writer of pages may change, and names of keys.
ALLOWED = {
    "docs/measurements/faults.md": 6,
    "docs/reference/keys/data.md": 1,  # the key `beside`
}
# For each 1,000 lines of pipeline/ and launch/. Whoever rewrites docstrings lowers it; nobody raises it.
MOST_IN_CODE = 2.1
MOST_IN_DECISIONS = 260  # of all pages of docs/adr together; the index has none


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_page_is_in_plain_words(page: Path) -> None:
    found = count(prose(page))
    named = {PHRASES[phrase]: number for phrase, number in found.items()}
    assert found.total() <= ALLOWED.get(name_of(page), 0), f"{named}: run python -m tests.docs.plain"


def test_the_code_has_no_more_hard_phrases_than_it_had() -> None:
    assert per_thousand_lines() <= MOST_IN_CODE, "write docstrings and comments in plain words: tests/docs/plain.py"


def test_decisions_have_no_more_hard_phrases_than_they_had() -> None:
    decisions = sorted((REPOSITORY / "docs" / "adr").glob("*.md"))
    assert count(prose(decisions[-1])).total() == 0 and decisions[-1].name == "README.md"
    assert sum(count(prose(page)).total() for page in decisions) <= MOST_IN_DECISIONS


def test_phrases_are_counted_in_prose_and_comments_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("What becomes of it goes on, beside `what becomes of`.\n```text\ngoes on\n```\nThere is no room.\n")
    assert sorted(count(prose(page)).values()) == [1, 1, 1, 1]
    module = tmp_path / "module.py"
    module.write_text('"""The others."""\n\nTEXT = "goes on"  # held to\n')
    assert count(comments_and_docstrings(module)).total() == 2


def test_the_pages_are_found() -> None:
    assert {REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md"} < set(pages()) and len(pages()) > 40
