"""One more component of any kind is one more file: 1 of the plugin, 0 of the package."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from pipeline.config.registry import BUILT_IN
from tests.support.sources import nodes_of

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).parent / "sample_plugin"
KINDS = [*sorted(BUILT_IN), "verb"]


def _registered(file: Path) -> list[tuple[str, str]]:
    """(kind, name) of what a file registers, by `register(kind, name)` or `verb(name, ...)`."""
    found = []
    for node in nodes_of(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("register", "verb"):
            words = [word.value for word in node.args if isinstance(word, ast.Constant)]
            found.append(("verb", words[0]) if node.func.id == "verb" else (words[0], words[1]))
    return found


REGISTERED = {file: _registered(file) for file in sorted(PLUGIN.glob("*.py"))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_component_is_one_file_of_a_plugin_and_none_of_the_package(kind: str) -> None:
    files = [file for file, found in REGISTERED.items() if kind in {each for each, _ in found}]
    assert len(files) == 1 and len(REGISTERED[files[0]]) == 1, "its file registers it, and nothing else"
    (name,) = [name for _, name in REGISTERED[files[0]]]
    others = [file for file in PLUGIN.glob("*.py") if file != files[0] and name in _words(file)]
    assert [file.name for file in others] == (["model.py"] if kind == "task" else [])  # its model asks for it
    sources = [file for top in ("pipeline", "launch") for file in (REPOSITORY / top).rglob("*.py")]
    assert not [file for file in sources if name in _words(file)]
    assert not [file for file in (REPOSITORY / "conf").rglob("*.yaml") if name in file.read_text().split()]


@cache
def _words(file: Path) -> set[str]:
    """The texts in a file's code."""
    return {str(node.value) for node in nodes_of(file) if isinstance(node, ast.Constant)}
