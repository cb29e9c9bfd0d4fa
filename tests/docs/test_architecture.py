"""The picture and the table of rooms are those of the code."""

from __future__ import annotations

import configparser
import importlib.util
import re
from types import ModuleType

import pytest

from tests.docs.pages import REPOSITORY

AGAIN = "run: python docs/draw_architecture.py"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_architecture", REPOSITORY / "docs" / "draw_architecture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_has_the_floors_of_the_layers_contract(drawing: ModuleType) -> None:
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    layers = config["importlinter:contract:layers"]["layers"].split("\n")
    floors = [[word.strip().removeprefix("pipeline.") for word in line.split("|")] for line in layers if line.strip()]
    assert [[name for name, _ in floor] for floor in drawing.ROOMS] == floors


def test_the_picture_is_what_the_script_draws(drawing: ModuleType) -> None:
    assert drawing.OUTPUT.read_text() == drawing.draw(), AGAIN


def test_the_page_names_what_each_room_imports(drawing: ModuleType) -> None:
    assert drawing.PAGE.read_text() == drawing.page(), AGAIN


def test_no_text_of_the_picture_is_clipped(drawing: ModuleType) -> None:
    """By a generous width of a letter: 0.62 of the size in bold, 0.56 else. Browsers' own fonts are narrower."""
    sizes = {"title": 15 * 0.62, "room": 14 * 0.62, "note": 12.5 * 0.56}
    for kind, x, anchor, words in re.findall(
        r'<text class="(\w+)" x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">(.*?)</text>', drawing.draw()
    ):
        width = len(words) * sizes[kind]
        left, right = (float(x) - width, float(x)) if anchor == "end" else (float(x), float(x) + width)
        assert left >= drawing.MARGIN and right <= drawing.WIDTH - 8, words
    for floor in drawing.ROOMS:
        room = (drawing.ROOMS_WIDTH - drawing.GAP * (len(floor) - 1)) / len(floor)
        for name, holds in floor:
            assert 28 + len(name) * sizes["room"] + len(holds) * sizes["note"] < room, name
