"""What import-linter cannot see: who imports TorchRec's planner, and that each file is used as it says."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.sources import nodes_of

REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = sorted(
    file.relative_to(REPOSITORY) for top in ("pipeline", "launch") for file in (REPOSITORY / top).rglob("*.py")
)
VERBS = (
    "generate",
    "prepare",
    "plan",
    "train",
    "evaluate",
    "checkpoints",
    "registry",
    "predict",
    "serve",
    "export",
    "runs",
)

# Imports that close a cycle, in functions or for type checking. Remove an entry when its cycle is resolved; add none.
CLOSE_A_CYCLE = {
    ("pipeline.devices.cpu.kernel_pool", "pipeline.devices.cpu.openmp_regions"),
    ("pipeline.devices.philox", "pipeline.devices.cpu.kernels.philox"),
    ("launch.resources", "launch.workload"),
}


@cache
def _imported(module: Path) -> set[str]:
    """Full names of all that a file imports, at the top or in functions."""
    names: set[str] = set()
    for node in nodes_of(REPOSITORY / module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_only_the_planner_package_imports_torchrecs_planner() -> None:
    users = [
        str(module) for module in MODULES if any("torchrec.distributed.planner" in name for name in _imported(module))
    ]
    assert [user for user in users if not user.startswith("pipeline/planner/")] == []
    assert users, "the rule guards nothing: does the planner import TorchRec's?"


def test_production_code_imports_no_tests() -> None:
    assert [
        str(module)
        for module in MODULES
        if any(".test" in name or name.startswith("tests") for name in _imported(module))
    ] == []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    """Counts imports in functions and for type checking too. Extras are left out."""
    names = {".".join(module.with_suffix("").parts): module for module in MODULES if "extras" not in module.parts}
    graph = {
        name: {other for other in _imported(module) & names.keys() if (name, other) not in CLOSE_A_CYCLE}
        for name, module in names.items()
    }
    for name, other in CLOSE_A_CYCLE:
        assert other in _imported(names[name]), f"{name} no longer imports {other}: remove it from CLOSE_A_CYCLE"
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_every_module_opens_with_what_it_is_for() -> None:
    undocumented = [str(module) for module in MODULES if not ast.get_docstring(nodes_of(REPOSITORY / module)[0])]
    assert undocumented == []


def test_a_verb_opens_with_its_command_and_imports_nothing_heavy() -> None:
    """One process for all verbs: sys.modules would show what any of them imported."""
    code = (
        "import sys\n"
        "from pipeline.cli.verbs import find_verb\n"
        f"for name in {VERBS!r}:\n"
        "    verb = sys.modules[find_verb(name, []).__module__]\n"
        "    assert f'python -m pipeline {name} ' in verb.__doc__, verb.__doc__\n"
        "    heavy = {'torch', 'torchrec', 'pyarrow', 'duckdb'} & set(sys.modules)\n"
        "    assert not heavy, (name, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
