"""The cells of docs/learn/notebook.ipynb run one after another in a kernel."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import REPOSITORY
from tests.docs.test_commands import is_module_or_member

NOTEBOOK = REPOSITORY / "docs" / "learn" / "notebook.ipynb"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_each_import_exists_and_no_output_is_stored() -> None:
    nodes = [node for cell in cells() for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.ImportFrom)]
    ours = [
        (node.module or "", alias.name) for node in nodes for alias in node.names if "pipeline" in (node.module or "")
    ]
    assert [f"{module}.{name}" for module, name in ours if not is_module_or_member(f"{module}.{name}")] == []
    assert sum("pipeline." in cell for cell in cells()) >= 8
    assert not any(cell.get("outputs") for cell in json.loads(NOTEBOOK.read_text())["cells"])


def executed(folder: Path) -> Any:
    """Return the notebook with its outputs."""
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environ)
    return notebook


@pytest.mark.long
def test_the_notebook_runs_and_shows_pictures(tmp_path: Path) -> None:
    outputs = [output for cell in executed(tmp_path)["cells"] for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if "data" in output]
    assert sum("image/png" in each for each in shown) == 2
    assert sum("<iframe srcdoc" in each.get("text/html", "") for each in shown) == 2  # runs
    said = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "Warning" not in said and "\rtraining" in said  # the progress bar
