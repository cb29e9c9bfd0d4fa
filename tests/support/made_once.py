"""Make what many tests share once for all of xdist's workers, in a folder below the session's own."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

Made = TypeVar("Made")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Made]) -> Made:
    """What `make` has returned for an empty folder `name`; the worker that comes first makes it, the others wait for it.

    What it returns is pickled; where it failed, the next worker tries anew in another folder.
    """
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    result = root / f"{name}.pickle"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            attempt = len(list(root.glob(f"{name}_*")))
            folder = root / f"{name}_{attempt}"
            folder.mkdir()
            result.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(result.read_bytes())
