"""Tell whether a file was written to between two looks at it, without reading the file."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from pipeline.runtime.storage import storage


class Stamp(NamedTuple):
    """The size and version of a file. Equal stamps mean equal bytes, unless somebody sets clocks back.

    A local file has a time of modification and an inode, an object of S3 has an ETag. Other
    storage gives the size only.
    """

    size_bytes: int
    modified_ns: int = 0
    inode: int = 0
    etag: str = ""


def stamp_of(path: str) -> Stamp:
    """Raises FileNotFoundError."""
    if storage.is_local(path):
        status = os.stat(path)
        return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
    handler = storage.path_manager()._path_handlers[path.split("://", 1)[0] + "://"]
    if hasattr(handler, "size_and_etag"):
        size_bytes, etag = handler.size_and_etag(path)
        return Stamp(size_bytes, etag=etag)
    return Stamp(storage.size_bytes(path))


def difference(then: Stamp, now: Stamp) -> str:
    """Say in numbers what changed; empty for equal stamps."""
    found = []
    if now.size_bytes != then.size_bytes:
        found.append(f"it had {then.size_bytes:,} bytes and has {now.size_bytes:,}")
    if now.modified_ns != then.modified_ns:
        found.append(f"it was modified at {_clock(then.modified_ns)} and again at {_clock(now.modified_ns)}")
    if now.inode != then.inode:
        found.append(f"another file has its name (inode {then.inode}, now {now.inode})")
    if now.etag != then.etag:
        found.append(f"its ETag was {then.etag} and is {now.etag}")
    return ", ".join(found)


def _clock(modified_ns: int) -> str:
    seconds, rest = divmod(modified_ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}"
