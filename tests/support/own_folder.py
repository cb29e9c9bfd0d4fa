"""Give each test an empty working folder, so that it reads and writes no run, data set or plan of the checkout.

The default paths of jobs are relative (`runs/`, `datasets/`, ...), and people run the tests where `make train` has
filled these folders. Commands and ranks that a test starts use the test's folder too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_all_folders: str | None = None


def find_tests_from_any_folder() -> None:
    """Let processes import `tests` and `examples`, which are not installed, without the checkout as their folder."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(REPOSITORY) not in given:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, given)])


def enter_own_folder() -> None:
    """Change to a new empty folder. It stays until the session ends, because a process may outlive its test."""
    global _all_folders
    _all_folders = _all_folders or tempfile.mkdtemp(prefix="working-folders-")
    os.chdir(tempfile.mkdtemp(dir=_all_folders))


def remove_own_folders() -> None:
    if _all_folders is not None:
        shutil.rmtree(_all_folders, ignore_errors=True)
