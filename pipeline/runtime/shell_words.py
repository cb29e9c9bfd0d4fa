"""Write `key=value` as it is typed into a shell: commands that are printed can be copied, whatever a path is called."""

from __future__ import annotations

import re
import shlex

PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)


def word(key: str, value: object) -> str:
    return f"{key}={quoted(str(value))}"


def quoted(text: str) -> str:
    """Once for Hydra and once for the shell, where either would read something else."""
    if PLAIN.fullmatch(text):
        return text
    mark = "'" if '"' in text else '"'
    escaped = text.replace(mark, "\\" + mark)
    return shlex.quote(f"{mark}{escaped}{mark}")
