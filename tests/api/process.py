"""Count what a process holds: threads, open files, children, signal handlers and environment."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import psutil
import torch
import torch.distributed as dist


def held() -> dict[str, Any]:
    """Return what a call of the API must not change."""
    gc.collect()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "children": [child.pid for child in psutil.Process().children()],
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "environment": dict(os.environ),
        "group": dist.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "frozen": gc.get_freeze_count(),
    }


def changes(before: dict[str, Any], after: dict[str, Any], grown: tuple[str, ...] = ()) -> dict[str, tuple[Any, Any]]:
    """Return what differs. grown: counts that may rise, such as tasks while a library makes its pool."""
    return {name: (before[name], after[name]) for name in before if name not in grown and before[name] != after[name]}
