"""Say whether a file system has room for checkpoints, in numbers, before they are written."""

from __future__ import annotations

import os
import shutil

GIB = 1 << 30


def free_bytes(folder: str) -> int:
    """Of the file system that a local folder is on, or will be."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def shortage(folder: str, needed_bytes: int, what: str) -> str:
    """Empty where `needed_bytes` fit, else a sentence with path and bytes."""
    if (free := free_bytes(folder)) >= needed_bytes:
        return ""
    return (
        f"{folder} has {free:,} bytes ({free / GIB:.2f} GiB) free, {what} needs {needed_bytes:,} "
        f"({needed_bytes / GIB:.2f} GiB)"
    )
