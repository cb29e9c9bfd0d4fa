"""Each message of docs/reference/troubleshooting.md is one that the program prints, up to a few words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import REPOSITORY
from tests.support.sources import nodes_of

PAGE = REPOSITORY / "docs" / "reference" / "troubleshooting.md"
OTHERS = {"undefined symbol", "operator … does not exist", "Killed", "CUDA out of memory", "No space left on device"}
MESSAGES = [
    message
    for line in re.findall(r"(?m)^- (.+)$", PAGE.read_text())
    for message in re.findall(r"(?<!with )`(.+?)`(?= and | or |, with |$)", line)
]
LEAST_SHARED = 0.7  # of the message's words; a wording may change without the page, a message that is gone may not


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z_]{2,}", text.lower()))


def templates() -> Iterator[str]:
    """All texts of the sources; what is filled in is left out."""
    for folder in ("pipeline", "launch"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            for node in nodes_of(file):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    yield " ".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    yield from (REPOSITORY / "Makefile").read_text().splitlines()


@pytest.fixture(scope="module")
def known() -> list[set[str]]:
    return [found for text in templates() if len(found := words(text)) >= 2]


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) >= 60


@pytest.mark.parametrize("message", MESSAGES)
def test_the_program_prints_it(message: str, known: list[set[str]]) -> None:
    if any(other in message for other in OTHERS):
        return
    wanted = words(message)
    best = max(known, key=lambda text: len(wanted & text))
    missing = sorted(wanted - best)
    assert len(missing) <= (1 - LEAST_SHARED) * len(wanted), (
        f"the sources have no such message, the nearest lacks {missing}"
    )
