"""Remove what runs leave that nobody reads any more: files of old starts' ranks, and checkpoints set aside as damaged."""

from __future__ import annotations

import os
import time

from pipeline.runtime.process.rank_logs import DAY_S, old_starts, remove_starts
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.atomic import DAMAGED, DAMAGED_MANIFEST
from pipeline.runtime.storage.lease import take_lease
from pipeline.runtime.storage.manifest import MANIFEST
from pipeline.training.runs.folder import Run

LOGS, CHECKPOINTS = "logs", "checkpoints"


def clean(run: Run, keep_days: float) -> list[str]:
    """Remove what is older than `keep_days`; the paths that were removed. Each rank's newest files go with their start.

    In an object store nothing says when a step was set aside: it is removed with keep_days=0 alone.

    Raises:
        RunFolderHeldError: the run is being written to.
    """
    folder = run.config.get("checkpoint", {}).get("folder") or storage.join(run.path, CHECKPOINTS)
    damaged = _damaged(folder, keep_days)
    starts: list[str] = []
    if storage.is_local(run.path):
        take_lease(run.path, float(run.config.get("trainer", {}).get("lease_ttl_s", 120.0))).release()
        starts = old_starts(os.path.join(run.path, LOGS), kept=0, days=keep_days)
    for path in damaged:
        storage.remove(path)
    remove_starts(starts)
    return [*damaged, *starts]


def _damaged(folder: str, keep_days: float) -> list[str]:
    names = storage.list_folder(folder)
    if storage.is_local(folder):
        paths = [storage.join(folder, name) for name in names if name.startswith(DAMAGED)]
        # A folder is renamed when it is set aside: that is its last change of status.
        return [path for path in paths if os.stat(path).st_ctime < time.time() - keep_days * DAY_S]
    if keep_days:
        return []
    return [storage.join(folder, name) for name in names if _is_set_aside(storage.join(folder, name))]


def _is_set_aside(step: str) -> bool:
    """Whether a step in an object store has the manifest of a damaged one, and no other since."""
    entries = storage.list_folder(step)
    return MANIFEST not in entries and any(entry.startswith(DAMAGED_MANIFEST) for entry in entries)
