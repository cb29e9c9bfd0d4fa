"""What docs/cluster.md shows is what the command beside it prints."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from launch.render import render

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
PYTHON = "/opt/venv/bin/python"  # the environment of the page
SHOWN = re.findall(r"(?ms)^```\n\$ python -m launch\.render (.*?)\n(.*?)^```", DOCS.read_text())


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command.split(" --")[0] for command, _ in SHOWN])
def test_the_page_shows_what_the_command_prints(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    words = shlex.split(command)
    assert render(words[0], words[1:]) == shown


def test_the_page_shows_a_script_and_a_line() -> None:
    assert {"slurm", "torchrun"} <= {command.split()[0] for command, _ in SHOWN}
