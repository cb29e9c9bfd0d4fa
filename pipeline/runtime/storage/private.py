"""Make folders that only this user can write to, and open files in shared folders without following links.

Files that are trusted because of where they are (compiled kernels, staged rows, locks) are used only from a folder
of this user with mode 0700: another user may have made the predictable name in /tmp first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from typing import IO

from pipeline.runtime.errors import ConfigError


def private_problem(folder: str) -> str:
    """Return "" if only this user can use the folder, otherwise what is wrong with it."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder (a link is not followed)"
    if found.st_uid != os.getuid():
        return f"{folder} belongs to user {found.st_uid}, and this process runs as user {os.getuid()}"
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        return f"{folder} is open to other users (mode {stat.S_IMODE(found.st_mode):o}, {mode:o} too much)"
    return ""


def private_folder(folder: str) -> str:
    """Make the folder with mode 0700 if it is missing, and return its path.

    Raises ConfigError if it is a link, belongs to another user, or is open to other users.
    """
    os.makedirs(os.path.dirname(folder) or ".", exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if problem := private_problem(folder):
        raise ConfigError(f"{problem}; files in it could be another user's: remove it, or chmod 700 if it is yours")
    return folder


def temporary_folder() -> str:
    """Return this user's folder for files that a restart must find again: $TMPDIR/pipeline-<uid>."""
    return private_folder(os.path.join(tempfile.gettempdir(), f"pipeline-{os.getuid()}"))


def open_lock(path: str) -> IO[bytes]:
    """Open a lock file, and create it if it is missing. An existing file is not truncated.

    Raises ConfigError if the path is a link.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, and a lock is a file: remove it") from None
        raise
    return os.fdopen(handle, "r+b")
