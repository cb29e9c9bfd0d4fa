"""The page says what each fault's test reached, and owns up where none did."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.catalogue import FAULTS
from tests.faults.report import render

RECORD = {"number": 9, "figure": "60 of 60 rejected", "count": 60, "seed": 7, "seconds": 3.1, "date": "2026-11-21"}


def test_a_figure_stands_in_its_row_and_a_fault_without_one_is_said_to_have_none() -> None:
    table = render([RECORD])
    assert (
        "| 9 | each file of a step truncated, deleted, zeroed | 60 | 60 of 60 rejected | 7 | 3.1 | 2026-11-21 |"
        in table
    )
    assert table.count("**no test passed**") == len(FAULTS) - 1


def test_the_page_has_each_fault_by_its_number_and_title() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measurements" / "faults.md").read_text()
    rows = [(int(number), title) for number, title in re.findall(r"(?m)^\| (\d+) \| (.*?) \|", page)]
    assert list(dict.fromkeys(rows)) == list(FAULTS.items())
