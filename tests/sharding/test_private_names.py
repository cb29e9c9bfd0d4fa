"""Each private name of torch, torchrec and fbgemm that the package uses exists, with the parameters it is called with."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pipeline.sharding import compat
from pipeline.sharding.compat import LOOKUP, MCH, PRIVATE_NAMES, WRITTEN_FOR, PrivateName, VersionError, check_versions

PACKAGE = Path(compat.__file__).resolve().parents[1]
ROOMS = ("sharding", "planner", "checkpoint", "models")
OF_NAMED_TUPLES = {"_fields", "_replace"}  # public, whatever they begin with


@cache
def _owner(path: str) -> Any:
    module, _, name = path.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


@cache
def _instance(path: str) -> Any:
    """An object of the owners whose names are made while they are constructed; None for the others."""
    if path == LOOKUP:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

        tables = [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
        return _owner(path)(tables, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    if path == MCH:
        from torchrec.modules.mc_modules import LFU_EvictionPolicy

        return _owner(path)(4, torch.device("cpu"), LFU_EvictionPolicy(), 1)
    return None


@cache
def _text(module: ModuleType) -> str:
    path = Path(module.__file__ or "")
    return path.read_text() if path.suffix == ".py" else ""


@cache
def _source(owner: Any) -> str:
    """Of a module, or of a class and those that it inherits from; inspect.getsource would parse each file anew."""
    if isinstance(owner, ModuleType):
        return _text(owner)
    blocks = []
    for each in owner.__mro__:
        if each.__module__.startswith(("torch", "fbgemm")):
            pattern = rf"^class {each.__name__}\b.*?(?=^[^\s)]|\Z)"
            block = re.search(pattern, _text(sys.modules[each.__module__]), re.MULTILINE | re.DOTALL)
            blocks.append(block.group() if block else "")
    return "\n".join(blocks)


def _problem(private: PrivateName) -> str:
    """What is wrong with a name where it is installed; empty where all is well."""
    try:
        owner = _owner(private.owner)
    except (ImportError, AttributeError) as error:
        return f"{private.owner} is gone ({error})"
    found = getattr(owner, private.name, None) or getattr(_instance(private.owner), private.name, None)
    if private.parameters is None:
        is_there = found is not None or hasattr(_instance(private.owner), private.name)
        is_named = rf"(\b|\.){re.escape(private.name)}\b"  # set by a constructor, or on a parameter
        return "" if is_there or re.search(is_named, _source(owner)) else f"{private.owner} has no {private.name}"
    if found is None:
        return f"{private.owner} has no {private.name}"
    parameters = tuple(inspect.signature(found).parameters)
    expected = private.parameters
    return "" if parameters == expected else f"{private.name}({', '.join(parameters)}) was ({', '.join(expected)})"


def test_private_names_are_what_they_were() -> None:
    problems = [
        f"{problem}; look at {', '.join(f'pipeline/{file}' for file in private.used_by)}"
        for private in PRIVATE_NAMES
        if (problem := _problem(private))
    ]
    assert not problems, "\n".join(problems)


def test_a_name_that_has_changed_is_told_with_the_file_that_uses_it() -> None:
    gone = PrivateName(compat.COLLECTION, "_no_such_name", ("sharding/torchrec/sharder.py",))
    assert _problem(gone).endswith("has no _no_such_name")
    other = PrivateName(compat.COLLECTION, "_create_input_dist", (), ("self", "names"))
    assert _problem(other) == "_create_input_dist(self, input_feature_names) was (self, names)"
    assert "is gone" in _problem(PrivateName("torchrec.no_such_module:Class", "name", ()))


def _own_names(tree: ast.Module) -> set[str]:
    """What a file defines itself: functions, classes, attributes that it sets, fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _foreign_private_names(path: Path) -> set[str]:
    """Attributes of other libraries' objects, and imports, that begin with an underscore."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("pipeline"):
            is_private = "._" in node.module
            found |= {each.name for each in node.names if is_private or re.match(r"_(?!_)", each.name)}
    return found - _own_names(tree) - OF_NAMED_TUPLES


def test_the_list_names_every_private_name_of_the_rooms() -> None:
    listed = {(file, private.name) for private in PRIVATE_NAMES for file in private.used_by}
    used = {
        (str(path.relative_to(PACKAGE)), name)
        for room in ROOMS
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for name in _foreign_private_names(path)
    }
    assert not used - listed, f"not in pipeline/sharding/compat.py: {sorted(used - listed)}"
    for file in {file for file, _ in listed}:
        assert (PACKAGE / file).is_file(), f"{file} has gone elsewhere"
    unused = [
        (file, name) for file, name in listed if name not in (PACKAGE / file).read_text() and not name.endswith("_Req")
    ]
    assert not unused, f"listed, but no longer used: {unused}"


def _with_versions(**found: str | None) -> Any:
    def version(distribution: str) -> str:
        name = "fbgemm" if distribution.startswith("fbgemm") else distribution
        value = found.get(name, f"{WRITTEN_FOR[name]}.0")
        if value is None:
            raise PackageNotFoundError(distribution)
        return value

    return patch.object(compat, "version", version)


def test_versions_written_for_pass_whatever_their_patch_and_build() -> None:
    check_versions()  # those installed
    with _with_versions(torch="2.14.4+cu130", fbgemm="1.9.2"):
        check_versions()


@pytest.mark.parametrize("found", [{"torch": "2.12.1"}, {"torchrec": "1.8.0"}, {"fbgemm": "1.6.0"}, {"fbgemm": None}])
def test_other_versions_are_refused_in_one_line_that_says_what_to_install(found: dict[str, str | None]) -> None:
    with _with_versions(**found), pytest.raises(VersionError) as error:
        check_versions()
    message = str(error.value)
    assert "\n" not in message and all(f"{wanted}.0" in message for wanted in WRITTEN_FOR.values())
    assert all(version in message for version in found.values() if version)


def test_who_knows_may_run_other_versions_but_not_without_them() -> None:
    with patch.object(compat, "_are_untested_allowed", False):
        compat.allow_untested_versions()
        with _with_versions(torchrec="1.8.0"):
            check_versions()
        with _with_versions(torchrec=None), pytest.raises(VersionError):
            check_versions()


def test_the_check_comes_before_anything_of_torch_is_imported() -> None:
    """So that a wrong version is one line, and not an ImportError of a name that it lacks."""
    script = (
        "import sys, importlib.metadata as m\n"
        "m.version = lambda name: '1.0.0'\n"
        "from pipeline.runtime.errors import UserError\n"
        "try:\n    import pipeline.sharding.torchrec.sharding\n"
        "except UserError as error:\n    print(error.code, 'torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "version False"
