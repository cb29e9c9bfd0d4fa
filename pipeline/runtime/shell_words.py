"""Quote `key=value` for a shell, so that printed commands can be copied for any path."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)


def word(key: str, value: object) -> str:
    return f"{key}={quoted(str(value))}"


def command(verb: str, words: Sequence[str] | None = None) -> str:
    """Return `python -m pipeline <verb>` with the --config-dir of this process's command."""
    given = list(sys.argv[1:] if words is None else words)
    flag: list[str] = []
    for number, each in enumerate(given):
        if each == "--config-dir":
            flag = given[number : number + 2]
        elif each.startswith("--config-dir="):
            flag = [each]
    return shlex.join(["python", "-m", "pipeline", verb, *flag])


def quoted(text: str) -> str:
    """Quote once for Hydra and once for the shell, if they would change the text."""
    if PLAIN.fullmatch(text):
        return text
    mark = "'" if '"' in text else '"'
    escaped = text.replace(mark, "\\" + mark)
    return shlex.quote(f"{mark}{escaped}{mark}")
