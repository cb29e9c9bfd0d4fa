"""Keep the source of components that a notebook's cell or a script defines, for other processes and for the run.

A model that a cell registers exists in this process alone. Its source becomes the plugin CELLS: the
ranks of a training import it, and the run folder keeps it in source/plugins, as it keeps every plugin.
"""

from __future__ import annotations

import ast
import linecache
import symtable
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pipeline.config.registry import components_of
from pipeline.runtime.errors import ConfigError

CELLS = "notebook_cells"
MAIN = "__main__"
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


@contextmanager
def kept_cells(plugins: list[str]) -> Iterator[list[str]]:
    """Yield the plugins, and CELLS if components are defined in __main__. Raises ConfigError if their source
    cannot be found, or uses a value of the notebook that other processes cannot have."""
    found = components_of(MAIN)
    if not found:
        yield plugins
        return
    with tempfile.TemporaryDirectory(prefix="cells-") as folder:
        file = Path(folder, f"{CELLS}.py")
        file.write_text(source_of(found))
        module = ModuleType(CELLS)  # not executed here, where the components exist already
        module.__file__ = str(file)
        sys.path.insert(0, folder)
        sys.modules[CELLS] = module
        try:
            yield [*(name for name in plugins if name != CELLS), CELLS]
        finally:
            sys.path.remove(folder)
            del sys.modules[CELLS]


def source_of(found: list[Any]) -> str:
    """Return a module with the definitions of the cells that define these classes and functions."""
    parts: dict[str, str] = {}  # file name of a cell -> its definitions, what they need first
    for each in found:
        _add(each, parts)
    return "\n\n".join(parts.values()) + "\n"


def _add(component: Any, parts: dict[str, str]) -> None:
    name = _file_of(component)
    if name in parts:
        return
    parts[name] = ""  # a cell may name itself
    source = _definitions(name)
    needed = [_as_import(each, vars(sys.modules[MAIN])[each], parts) for each in _names_from_elsewhere(source)]
    del parts[name]
    parts[name] = "\n".join([*filter(None, needed), source])


def _file_of(component: Any) -> str:
    """Return the file name under which the cell's source is kept."""
    members = [component] if isinstance(component, FunctionType) else list(vars(component).values())
    for member in members:
        function = getattr(member, "__func__", getattr(member, "fget", member))
        name = function.__code__.co_filename if isinstance(function, FunctionType) else ""
        if name and linecache.getlines(name):
            return name
    raise ConfigError(
        f"the source of {component.__qualname__} cannot be found: define it in a module, and name that in plugins=[...]"
    )


def _definitions(name: str) -> str:
    """Return imports, functions, classes and constants of the cell. What it calls is left out."""
    lines = linecache.getlines(name)
    kept = []
    for each in ast.parse("".join(lines)).body:
        is_call = isinstance(each, (ast.Assign, ast.AnnAssign)) and any(
            isinstance(at, ast.Call) for at in ast.walk(each)
        )
        if isinstance(each, DEFINITIONS) and not is_call:
            first = min([each.lineno, *(at.lineno for at in getattr(each, "decorator_list", []))])
            kept.append("".join(lines[first - 1 : each.end_lineno]).rstrip())
    return "\n\n".join(kept)


def _names_from_elsewhere(source: str) -> list[str]:
    """Return the names that the source uses, does not define, and the notebook has."""
    top = symtable.symtable(source, CELLS, "exec")
    own = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    used: dict[str, None] = {}
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        symbols = (each for each in table.get_symbols() if each.is_referenced())
        used |= dict.fromkeys(each.get_name() for each in symbols if table is top or each.is_global())
    return [name for name in used if name not in own and name in vars(sys.modules[MAIN])]


def _as_import(name: str, value: Any, parts: dict[str, str]) -> str:
    """Return a line that gives the name its value. The cell of a function or class is added to `parts`."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module, inner = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module == MAIN and inner:
        _add(value, parts)
        return ""
    if module and inner.isidentifier():
        return f"from {module} import {inner} as {name}"
    try:
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    except (ValueError, SyntaxError):
        pass
    raise ConfigError(
        f"{name!r} is a {type(value).__name__} of the notebook, which other processes do not have: define it in the "
        "cell that uses it, or pass it by the config"
    )
