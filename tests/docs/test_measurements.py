"""docs/measurements/ is what its JSON files say, and no page in it is typed, except the ones marked so."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.docs.pages import REPOSITORY

FOLDER = REPOSITORY / "docs" / "measurements"


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_measurements", FOLDER.parent / "write_measurements.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_script_writes(writer: ModuleType) -> None:
    pages = writer.render()
    there = {file.name: file.read_text() for file in FOLDER.glob("*.md") if file.name not in writer.BY_HAND}
    assert there == pages, "run python docs/write_measurements.py"


def test_a_page_names_command_machine_and_commit(writer: ModuleType) -> None:
    about = {"command": "python -m benchmarks.step", "cpu": "a CPU", "commit": "abc"}
    assert all({"command", "date"} <= set(writer.read(file)[0]) for file in FOLDER.glob("*.json*"))
    assert (
        writer.table_of([{"preset": "a", "cpu_ms": 1234.5, "rounds": [1]}])
        == "| preset | cpu ms |\n| --- | --- |\n| a | 1,234 |"
    )
    assert writer._shown("command", about["command"]) == "`python -m benchmarks.step`"


def test_a_page_copied_by_hand_says_so(writer: ModuleType) -> None:
    for name in writer.BY_HAND:
        assert "by hand" in (FOLDER / name).read_text()[:600]
