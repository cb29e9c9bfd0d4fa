"""The cells of docs/learn/quickstart.ipynb import what exists, and run one after another."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY
from tests.docs.test_commands import is_module_or_member

NOTEBOOK = REPOSITORY / "docs" / "learn" / "quickstart.ipynb"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_each_import_exists_and_no_output_is_stored() -> None:
    nodes = [node for cell in cells() for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.ImportFrom)]
    ours = [
        (node.module or "", alias.name) for node in nodes for alias in node.names if "pipeline" in (node.module or "")
    ]
    assert len(ours) >= 8
    assert [f"{module}.{name}" for module, name in ours if not is_module_or_member(f"{module}.{name}")] == []
    assert not any(cell.get("outputs") for cell in json.loads(NOTEBOOK.read_text())["cells"])


@pytest.mark.campaign
def test_the_notebook_runs(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    body = "\n".join(cells())
    script.write_text(
        f"def main():\n{''.join(f'    {line}' for line in body.splitlines(True))}\n    return scores\n\nmain()\n"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
