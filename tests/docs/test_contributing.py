"""CONTRIBUTING.md shows the example as it is, and its table is true: one file registers one component."""

from __future__ import annotations

import re

import pytest

from pipeline.config.registry import BUILT_IN
from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text()
ROWS = re.findall(r"(?m)^\| an? .*? \| 1 \| `(\w+)` \| `(\S+)` \|$", PAGE)


def test_the_page_shows_the_examples_as_they_are() -> None:
    shown = re.findall(r"(?s)<!-- example -->\n```python\n(.*?)```", PAGE)
    assert shown == [(REPOSITORY / "examples" / f"{name}.py").read_text() for name in ("custom_model", "accuracy")]


def test_the_table_names_every_kind_of_component() -> None:
    assert {kind for kind, _ in ROWS} == {*BUILT_IN, "verb"}


@pytest.mark.parametrize(("kind", "path"), ROWS)
def test_one_file_registers_it(kind: str, path: str) -> None:
    text = (REPOSITORY / path).read_text()
    registered = r'^main = verb\("\w+"' if kind == "verb" else rf'^@register\("{kind}", "\w+"\)'
    assert re.search(registered, text, re.M), f"{path} registers no {kind}"
