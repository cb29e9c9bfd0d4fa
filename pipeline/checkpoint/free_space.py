"""Check that a file system has space for checkpoints before they are written."""

from __future__ import annotations

import os
import shutil

GIB = 1 << 30


def free_bytes(folder: str) -> int:
    """Return the free bytes of the file system of a local folder, which may not exist yet."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def shortage(folder: str, needed_bytes: int, what: str) -> str:
    """Return "" if `needed_bytes` fit, otherwise a sentence with path and bytes."""
    if (free := free_bytes(folder)) >= needed_bytes:
        return ""
    return (
        f"{folder} has {free:,} bytes ({free / GIB:.2f} GiB) free, {what} needs {needed_bytes:,} "
        f"({needed_bytes / GIB:.2f} GiB)"
    )
