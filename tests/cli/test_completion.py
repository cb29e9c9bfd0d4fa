"""TAB completes verbs, keys and options in bash, zsh and fish, from what is written into the script alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.extras.completion.cli.completion import SHELLS, completion
from pipeline.runtime.errors import ConfigError
from tests.support.messages import names

ASK = """
COMP_LINE="$1" COMP_POINT=${#1} COMP_WORDBREAKS=$' \\t\\n"><=;|&(:'
COMP_WORDS=($1) COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
[[ "$1" == *" " ]] && COMP_WORDS+=("") && COMP_CWORD=$(( COMP_CWORD + 1 ))
_pipeline_complete; echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {shell: completion(shell) for shell in SHELLS}


def _tab(shell: str, script: str, line: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    if shell == "fish":
        words = ["fish", "--no-config", "-c", f"{script}\ncomplete -C '{line}'"]
    else:
        words = ["bash", "--norc", "-c", script + ASK, "bash", line]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.replace("\n", " ").split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("python -m pipeline tra", ["train"]),
        ("python -m pipeline train optimizer.sparse.lr", ["optimizer.sparse.lr="]),
        ("python -m pipeline train optimizer.sp", ["optimizer.sparse."]),
        ("python3 -m pipeline train experiment=quickstart model=dlrm", ["dlrm", "dlrm_dcn"]),
        ("python -m pipeline train debug=an", ["anomaly"]),
        ("python -m pipeline train trainer.compile=", ["true", "false"]),
        ("python -m pipeline runs com", ["compare"]),
        ("python -m pipeline completion z", ["zsh"]),
    ],
)
def test_bash_completes(scripts: dict[str, str], line: str, found: list[str]) -> None:
    assert _tab("bash", scripts["bash"], line) == found


def test_another_module_of_python_gets_files_in_bash(scripts: dict[str, str]) -> None:
    Path("setup.cfg").touch()  # a test's working folder is empty
    assert "setup.cfg" in _tab("bash", scripts["bash"], "python -m pytest setup")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("python -m pipeline tra", {"train"}),
        ("python -m pipeline train model=dlrm", {"model=dlrm", "model=dlrm_dcn"}),
        ("python3 -m pipeline runs com", {"compare"}),
    ],
)
def test_fish_completes(scripts: dict[str, str], line: str, found: set[str]) -> None:
    assert set(_tab("fish", scripts["fish"], line)) == found


def test_zsh_reads_its_script(scripts: dict[str, str]) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh on this machine")
    done = subprocess.run(
        [
            "zsh",
            "-f",
            "-c",
            scripts["zsh"] + "\nprint -r -- $_comps[python]; _pipeline_words train | tr ' ' '\\n' | grep -c =",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    shown, count = done.stdout.split("\n")[:2]
    assert "_bash_complete" in shown and int(count) > 400, done.stderr


def test_a_shell_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=names("completion bash 'bsh'")):
        completion("bsh")
