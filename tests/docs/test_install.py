"""The page's commands install what `make install` installs, and name the extras that there are."""

from __future__ import annotations

import re
from configparser import ConfigParser

from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "getting_started.md").read_text()
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def extras() -> set[str]:
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    return set(setup["options.extras_require"])


def test_by_hand_the_same_is_installed_as_by_make() -> None:
    recipe = re.search(r"(?ms)^\$\(VENV\)/installed:.*?^$", MAKEFILE)
    assert recipe is not None
    own = dict(re.findall(r"(?m)^(STACK|TORCHREC) :?\??= (.*)$", MAKEFILE))
    by_make = re.findall(r"\$\(PIP_INSTALL\) (.*)", recipe[0])
    wanted = [line.replace("$(STACK)", "cpu").replace("$(TORCHREC)", own["TORCHREC"]) for line in by_make]
    by_hand = [line.replace(" -c constraints.txt", "") for line in re.findall(r"(?m)^pip install (.*)$", PAGE)]
    assert by_hand == wanted
    assert "-m pipeline.precompile" in recipe[0] and "python -m pipeline.precompile" in PAGE


def test_the_extras_that_are_named_are_those_that_there_are() -> None:
    listed = re.search(r"(?s)are extras, (.*?): an error names", PAGE)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == extras() - {"cpu", "gpu", "serve", "dev"}
