"""Give Numba a folder for compiled kernels where all that it knows are read-only; before it is imported.

It refuses to import a cached kernel otherwise: in a container with a read-only root, or a shared installation without a home.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pipeline

VARIABLE = "NUMBA_CACHE_DIR"


def find_kernel_cache() -> None:
    """What an image has compiled is copied, for Numba takes nothing from a folder that it cannot write to."""
    given = os.environ.get(VARIABLE)
    if given:
        usable = _is_writable(Path(given))
    else:
        own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        usable = _is_writable(Path(pipeline.__path__[0])) or _is_writable(Path(own))
    if usable:
        return
    folder = Path(tempfile.gettempdir()) / f"numba-{os.getuid()}"
    if given and Path(given).is_dir() and not folder.exists():
        _copy(Path(given), folder)
    os.environ[VARIABLE] = str(folder)


def _is_writable(folder: Path) -> bool:
    """Or can be made, and then is."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    return os.access(there, os.W_OK | os.X_OK)


def _copy(source: Path, folder: Path) -> None:
    """Whole or not at all: of several ranks one comes first."""
    staged = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    with contextlib.suppress(OSError):
        shutil.copytree(source, staged, dirs_exist_ok=True)
        os.rename(staged, folder)
    shutil.rmtree(staged, ignore_errors=True)
