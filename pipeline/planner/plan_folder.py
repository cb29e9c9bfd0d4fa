"""Find the file that a job's plan_file names: as written, else among those that ship (no torch import)."""

from __future__ import annotations

from pathlib import Path

from pipeline.runtime.errors import PlanError
from pipeline.runtime.storage import storage

FOLDER = "sharding_plans"
PACKAGE = Path(__file__).resolve().parents[1]


def find_plan_file(path: str, command: str) -> str:
    """Look at `path`, then among the plans that ship; `command` is what makes one. Raises PlanError for neither."""
    if storage.is_file(path):
        return path
    looked = [path]
    if not path.startswith("/") and "://" not in path:
        looked.append(str(shipped_folder() / path.removeprefix(FOLDER + "/")))
        if storage.is_file(looked[-1]):
            return looked[-1]
    raise PlanError(f"no plan file at {' or '.join(looked)}; make one: {command}")


def shipped_folder() -> Path:
    """sharding_plans/ beside the package of a checkout, or of a copy of one, else in the installed package."""
    return (PACKAGE.parent if (PACKAGE.parent / "setup.cfg").is_file() else PACKAGE) / FOLDER
