"""Turn a job's plan_file into the file that holds it: as written, else among those that ship (no torch import)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from pipeline import storage

FOLDER = "sharding_plans"
REPOSITORY = Path(__file__).resolve().parents[2]


def find_plan_file(path: str, command: str) -> str:
    """Look at `path`, then in sharding_plans/ beside the package of a checkout, else in the installed package."""
    if storage.is_file(path):
        return path
    looked = [path]
    name = path.removeprefix(FOLDER + "/")
    if not path.startswith("/") and "://" not in path:
        shipped = REPOSITORY / FOLDER if (REPOSITORY / "setup.cfg").is_file() else _installed_folder()
        if shipped is not None:
            looked.append(str(shipped / name))
            if storage.is_file(looked[-1]):
                return looked[-1]
    raise ValueError(f"no plan file at {' or '.join(looked)}; make one: {command}")


def _installed_folder() -> Path | None:
    try:
        return Path(str(resources.files(f"pipeline.{FOLDER}")))
    except ModuleNotFoundError:
        return None
