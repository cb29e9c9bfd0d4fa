"""Check names that a file gives before they become paths: none may lead out of its folder."""

from __future__ import annotations

import re

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import storage

MAX_NAME_BYTES = 1024
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")  # control characters; on Windows \ separates parts


def name_problem(name: object) -> str:
    """Return an empty text for a relative path below a folder, else what is wrong with the name."""
    if not isinstance(name, str):
        return f"is a {type(name).__name__}, not a name"
    if not name or len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        return f"has {len(name)} characters: a name has 1 to {MAX_NAME_BYTES} bytes"
    if FORBIDDEN.search(name) or "://" in name:
        return "has a control character, a backslash or '://' in its name"
    if wrong := [part for part in name.split("/") if part in ("", ".", "..")]:
        return f"leads out of its folder: a part of its name is {wrong[0]!r}"
    return ""


def path_below(folder: str, name: object, source: str) -> str:
    """Return the path of `name` below `folder`; `source` is the file that gives the name.

    Raises:
        DamagedError: the name leads elsewhere, or is not a name.
    """
    if problem := name_problem(name):
        raise DamagedError(f"{source}: {str(name)[:100]!r} {problem}")
    return storage.join(folder, str(name))
