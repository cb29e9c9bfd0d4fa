"""Ask the kernel to write a part of a file to the disk now, or wait until it has.

By itself it begins when a good part of memory is dirty, and an fsync at the end then waits for nearly all of a file.
Where the system has no such call (it is Linux's), nothing is begun early and fsync does all.
"""

from __future__ import annotations

import ctypes
import errno
import os

WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4  # of sync_file_range(2)
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def begin_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Raises OSError where the disk has refused bytes: fsync would not say so once more."""
    _call(descriptor, offset, num_bytes, WRITE)


def wait_for_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Until the disk has been given these bytes; an fsync is still needed for what it keeps in memory. Raises OSError."""
    _call(descriptor, offset, num_bytes, WAIT_BEFORE | WRITE | WAIT_AFTER)


def _call(descriptor: int, offset: int, num_bytes: int, flags: int) -> None:
    if _sync_file_range is None or not num_bytes:
        return
    if _sync_file_range(descriptor, offset, num_bytes, flags):
        number = ctypes.get_errno()
        if number not in UNSUPPORTED:
            raise OSError(number, os.strerror(number))
