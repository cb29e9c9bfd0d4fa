"""The examples of docs/reference/python.md run, and show what they show."""

from __future__ import annotations

import doctest

import pytest

from tests.docs.pages import REPOSITORY


@pytest.mark.long
def test_every_example_of_the_page_runs() -> None:
    result = doctest.testfile(
        str(REPOSITORY / "docs" / "reference" / "python.md"),
        module_relative=False,
        optionflags=doctest.NORMALIZE_WHITESPACE,
    )
    assert result.attempted > 30 and result.failed == 0
