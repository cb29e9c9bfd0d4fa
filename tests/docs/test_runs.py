"""The blocks of a page that are marked `run` run, one after the other, in one folder.

The folder begins as `make train` leaves one behind, with fewer rows: a data set, a run and its plan.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, blocks_of, name_of, script_of

MARKED = [page for page in PAGES if any(block.mark == "run" for block in blocks_of(page))]
FIRST = """
python -m pipeline.generate data=quickstart data.synthetic.num_rows=60000
python -m pipeline.prepare data=quickstart source=datasets/raw/quickstart.tsv
python -m pipeline.train experiment=quickstart
"""


def run(script: str, folder: Path, name: str) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(FIRST, folder, "the data set and the run that pages begin with")
    return folder


@pytest.mark.campaign
@pytest.mark.parametrize("page", MARKED, ids=name_of)
def test_the_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    blocks = [block for block in blocks_of(page) if block.mark == "run"]
    if any("quickstart" in block.text for block in blocks):
        subprocess.run(["cp", "-r", f"{request.getfixturevalue('trained')}/.", str(tmp_path)], check=True)
    for block in blocks:
        run(script_of(block), tmp_path, str(block))


def test_pages_that_run_are_the_ones_that_teach() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/commands.md"} <= set(map(name_of, MARKED))
