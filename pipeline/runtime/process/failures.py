"""Report an error to the user and to the launcher, without credentials (stdlib only)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import traceback

from pipeline.runtime.masking import mask, printable

# What the user has to fix: disk space, permissions, a path.
_HINTS = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EIO: "the disk or its connection failed: dmesg says more. Run the same command again when it works",
    errno.EDQUOT: "your quota is used up: free some space, or choose a folder on another disk",
    errno.EFBIG: "a limit on file sizes is in force here (ulimit -f)",
    errno.EACCES: "choose a folder that you can write to",
    errno.EPERM: "choose a folder that you can write to",
    errno.EROFS: "choose a folder that you can write to",
    errno.ENOTDIR: "a part of that path is a file: choose another path",
    errno.EISDIR: "that is a folder: choose another path",
    errno.ENOENT: "check that path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def describe_os_error(error: OSError, folder: str = "") -> str:
    """Return one line with path and fix; empty for an error that no user can fix.

    folder: the folder that was being written.
    """
    hint = _HINTS.get(error.errno or 0)
    if hint is None:
        return ""
    named = error.filename2 or error.filename or folder
    path = f" ({named})" if named else ""
    # libraries word such errors differently
    return mask(f"{os.strerror(error.errno or 0)}{path}; {hint}")


def write_error_file(message: str, error: BaseException | None = None) -> None:
    """Write the reason why this rank ends to the error file of torchelastic's agent, if there is one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stack = "".join(traceback.format_exception(error)) if error else ""
    about = {"py_callstack": mask(stack), "timestamp": str(int(time.time()))}
    staged = f"{path}.{os.getpid()}.tmp"
    # Write the file completely or not at all, because torchelastic's agent fails on a partial file.
    # Without the file, the exit code still says that the rank failed.
    with contextlib.suppress(OSError):
        with open(staged, "w") as file:
            json.dump({"message": {"message": mask(message), "extraInfo": about}}, file)
        os.replace(staged, path)


def masked_traceback(error: BaseException) -> str:
    return printable(mask("".join(traceback.format_exception(error))))
