"""Each function that is asked of an extra is given by one extra, and exists; no function is given in vain."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from pipeline.cli.verbs import DEFINES_MAIN, VERBS_OF_EXTRAS
from tests.support.own_folder import REPOSITORY
from tests.support.sources import nodes_of

PACKAGE = REPOSITORY / "pipeline"
EXTRAS = sorted(file.parent.name for file in PACKAGE.glob("extras/*/__init__.py"))
GIVEN = {
    (extra, name): place
    for extra in EXTRAS
    for name, place in getattr(import_module(f"pipeline.extras.{extra}"), "FUNCTIONS", {}).items()
}


def asked_for(file: Path) -> Iterator[str]:
    for node in nodes_of(file):
        match node:
            case ast.Call(func=ast.Name(id="from_extra" | "if_installed"), args=[ast.Constant(value=str(name)), *_]):
                yield name


def test_what_is_asked_for_is_what_the_extras_give() -> None:
    asked = {name for file in PACKAGE.rglob("*.py") for name in asked_for(file)}
    names = Counter(name for _, name in GIVEN)
    assert asked == names.keys() and max(names.values()) == 1


def test_the_core_knows_which_extra_has_a_verb() -> None:
    files = PACKAGE.glob("extras/*/cli/*.py")
    verbs = {file.stem: file.parts[-3] for file in files if DEFINES_MAIN.search(file.read_text())}
    assert verbs == VERBS_OF_EXTRAS


def test_each_function_and_module_that_an_extra_registers_exists() -> None:
    missing = []
    for (extra, name), place in GIVEN.items():
        module, _, function = place.partition(":")
        file = REPOSITORY / f"{module.replace('.', '/')}.py"
        defined = {getattr(node, "name", "") for node in nodes_of(file)} if file.is_file() else set()
        if not set(function.split(".")) <= defined:
            missing.append(f"{extra}: {name} = {place}")
    for extra in EXTRAS:
        for kind, module in getattr(import_module(f"pipeline.extras.{extra}"), "COMPONENTS", {}).items():
            path = REPOSITORY / module.replace(".", "/")
            if not (path.is_dir() or path.with_suffix(".py").is_file()):
                missing.append(f"{extra}: {kind} = {module}")
    assert missing == []
