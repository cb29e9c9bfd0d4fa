"""Say what a benchmark's figures were measured with: command, machine, versions, commit, date."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.reader import cpu_name


def about(**settings: Any) -> dict[str, Any]:
    """Return the head of a JSON file of figures. docs/write_measurements.py prints it on the page of the file."""
    module = Path(sys.argv[0]).stem
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "torch": version("torch"),
        "torchrec": version("torchrec"),
        "commit": commit(),
        **settings,
    }


def commit() -> str:
    """The commit of the checkout, with a plus sign if tracked files differ from it."""
    folder = Path(__file__).parent
    described = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(described, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not known"
