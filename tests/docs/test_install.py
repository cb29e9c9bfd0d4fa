"""The page's commands install what `make install` installs, and name the extras that there are."""

from __future__ import annotations

import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "learn" / "getting_started.md").read_text()
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def extras() -> set[str]:
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    return set(setup["options.extras_require"])


def test_by_hand_the_same_is_installed_as_by_make() -> None:
    recipe = re.search(r"(?ms)^\$\(VENV\)/installed:.*?^$", MAKEFILE)
    assert recipe is not None
    own = dict(re.findall(r"(?m)^(STACK|TORCHREC|RUNTIME_SET) :?\??= (.*)$", MAKEFILE))
    by_make = re.findall(r"\$\(call install,(.*)\)", recipe[0])
    wanted = [line.replace("$(TORCHREC)", own["TORCHREC"]) for line in by_make]
    wanted = [line.replace("$(RUNTIME_SET)", own["RUNTIME_SET"]).replace("$(STACK)", "cpu") for line in wanted]
    by_hand = [line.replace(" -c constraints.txt", "") for line in re.findall(r"(?m)^pip install (.*)$", PAGE)]
    assert by_hand == wanted
    assert "-m pipeline precompile" in recipe[0] and "python -m pipeline precompile" in PAGE


def test_an_environment_keeps_its_set_until_make_is_asked_for_the_other(tmp_path: Path) -> None:
    def asked(*words: str) -> str:
        command = ["make", "-n", "-C", str(REPOSITORY), f"VENV={tmp_path}", "install", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    (tmp_path / "installed").write_text("gpu\n")
    assert "pip install" not in asked() and "pip install" not in asked("STACK=gpu")
    switched = asked("STACK=cpu")
    first, *_, last = [line for line in switched.splitlines() if "-m p" in line]
    assert "pip show -qq fbgemm-gpu " in first and "pip uninstall -qq -y fbgemm-gpu fbgemm-gpu-cpu" in first
    assert "'.[cpu,serve]'" in switched and "pipeline doctor stack=cpu" in switched and "precompile" in last


def test_the_extras_that_are_named_are_those_that_there_are() -> None:
    listed = re.search(r"(?s)are\sextras, (.*?)\. If an extra", PAGE)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == extras() - {"cpu", "gpu", "serve", "dev", "docs"}
