"""Bound a process's memory, page cache included, by a cgroup of version 2 or 1 below this process's own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[tuple[str, str]]:
    """(folder, which kind); ("", why not) where none can be made."""
    parent, kind = _parent()
    folder = parent / f"bench-{os.getpid()}-{time.monotonic_ns()}" if parent else None
    try:
        if folder is None:
            raise OSError("no memory controller")
        folder.mkdir()
        name = "memory.max" if kind == "v2" else "memory.limit_in_bytes"
        (folder / name).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # what goes to swap would be measured as if it were memory
            (folder / ("memory.swap.max" if kind == "v2" else "memory.swappiness")).write_text("0")
    except OSError as error:
        yield "", f"no cgroup ({error})"
        return
    try:
        yield str(folder), f"cgroup {kind}"
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def _parent() -> tuple[Path | None, str]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return ROOT / "memory" / path.lstrip("/"), "v1"
        if not controllers and (ROOT / path.lstrip("/") / "cgroup.controllers").exists():
            return ROOT / path.lstrip("/"), "v2"
    return None, ""
