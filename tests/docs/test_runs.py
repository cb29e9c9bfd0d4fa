"""The blocks of a page that are marked `run` run, one after the other, in one folder, and print what the page says.

The folder begins as `make train` leaves one behind, with fewer rows: a data set, a run and its plan. What a page says is the
block of text right below: its lines are printed in this order, whatever their numbers; each may be cut off at its end, and `...`
stands for any lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, Block, blocks_of, name_of, script_of

MARKED = [page for page in PAGES if any(block.mark == "run" for block in blocks_of(page))]
FIRST = """
python -m pipeline generate data=quickstart data.synthetic.num_rows=60000
python -m pipeline prepare data=quickstart source=datasets/raw/quickstart.tsv
python -m pipeline train experiment=quickstart
"""


def run(script: str, folder: Path, name: str) -> str:
    """What it prints, errors too."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


def said_after(block: Block, blocks: list[Block]) -> list[str]:
    """The lines of the block of text right below a block of commands; empty where anything else stands there."""
    below = block.line + block.text.count("\n") + 3  # the fence that closes it, and an empty line
    return next((each.text.splitlines() for each in blocks if each.line == below and each.language == "text"), [])


def shape_of(line: str) -> str:
    """The line without its numbers, versions of artifacts and spaces: another run has others."""
    return re.sub(r"\s+", " ", re.sub(r"\b[0-9a-f]{16}\b|[+-]?\d[\d.,e:-]*", "#", line)).strip()


def missing_line(said: list[str], printed: str) -> str:
    """The first line of `said` that is not printed behind those before it; empty where all are."""
    lines = iter([shape_of(line) for line in printed.splitlines()])
    wanted = (line for line in said if line.strip() != "...")
    return next((line for line in wanted if not any(found.startswith(shape_of(line)) for found in lines)), "")


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
        printed = run(script_of(block), tmp_path, str(block))
        missing = missing_line(said_after(block, blocks_of(page)), printed)
        assert not missing, f"{block}: the page says it prints\n{missing}\nIt printed\n{printed[-6000:]}"


def test_a_line_that_is_not_printed_in_its_order_is_found() -> None:
    printed = "step 3 saved in 0.2 s\nvalidation  AUC 0.71, NE 0.8\nmodel runs/a\n"
    said = ["step 24  saved in 1.0 s", "...", "model runs/a"]
    assert missing_line(said, printed) == ""
    assert missing_line(list(reversed(said)), printed) == said[0]
    assert missing_line(["validation  NE 0.8"], printed) == "validation  NE 0.8"
    assert missing_line(["validation  AUC 0.5"], printed) == ""


def test_pages_that_run_are_the_ones_that_teach() -> None:
    assert {"README.md", "docs/learn/tutorial.md", "docs/reference/commands.md"} <= set(map(name_of, MARKED))
