"""What docs/do/cluster.md shows is what the command beside it prints."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from launch.render import render
from launch.schedule import schedule

DOCS = Path(__file__).resolve().parents[2] / "docs" / "do" / "cluster.md"
PYTHON = "/opt/venv/bin/python"  # the environment of the page
PRINT = {"render": render, "schedule": schedule}
SHOWN = re.findall(r"(?ms)^```console\n\$ python -m launch\.((?:render|schedule) .*?)\n(.*?)^```", DOCS.read_text())


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command.split(" --")[0] for command, _ in SHOWN])
def test_the_page_shows_what_the_command_prints(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    line, _, most_lines = command.partition(" | head -n ")
    module, target, *words = shlex.split(line)
    printed = PRINT[module](target, words).splitlines(keepends=True)
    assert "".join(printed[: int(most_lines)] if most_lines else printed) == shown


def test_the_page_shows_every_target() -> None:
    shown = {tuple(command.split()[:2]) for command, _ in SHOWN}
    assert {("render", target) for target in ("slurm", "kubernetes", "torchrun")} <= shown
    assert {("schedule", target) for target in ("slurm", "kubernetes", "cron")} <= shown
