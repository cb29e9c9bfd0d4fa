"""Report an error to people and to the launcher, without credentials (stdlib only)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import traceback

from pipeline.runtime.masking import mask, printable

# What a person has to fix: disk space, rights, a path.
_HINTS = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "your quota is used up: free some space, or choose a folder on another disk",
    errno.EFBIG: "a limit on file sizes is in force here (ulimit -f)",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.ENOTDIR: "a part of that path is a file: choose another",
    errno.EISDIR: "that is a folder: choose another path",
    errno.ENOENT: "check that path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def describe_os_error(error: OSError, folder: str = "") -> str:
    """One line with path and hint; empty for an error that no user can fix. `folder`: what was being written."""
    hint = _HINTS.get(error.errno or 0)
    if hint is None:
        return ""
    named = error.filename2 or error.filename or folder
    path = f" ({named})" if named else ""
    return mask(f"{os.strerror(error.errno or 0)}{path}; {hint}")  # a library has other words of its own for it


def write_error_file(message: str, error: BaseException | None = None) -> None:
    """Tell torchelastic's agent why this rank ends, in the file that it names; nothing without an agent."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stack = "".join(traceback.format_exception(error)) if error else ""
    about = {"py_callstack": mask(stack), "timestamp": str(int(time.time()))}
    staged = f"{path}.{os.getpid()}.tmp"
    # Whole or not at all: torchelastic's agent dies of half a file, which a rank killed in here would leave. Without
    # one the exit code still says that the rank failed.
    with contextlib.suppress(OSError):
        with open(staged, "w") as file:
            json.dump({"message": {"message": mask(message), "extraInfo": about}}, file)
        os.replace(staged, path)


def masked_traceback(error: BaseException) -> str:
    return printable(mask("".join(traceback.format_exception(error))))
