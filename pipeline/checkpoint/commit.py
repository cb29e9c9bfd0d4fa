"""Turn an attempt's files into a committed step, and a step into nothing: by rename on disks, by manifest in object stores.

    local        <folder>/.attempt-00000300-<id>/...   renamed to <folder>/step_00000300/
    object store <folder>/step_00000300/<id>/...       committed by <folder>/step_00000300/manifest.json, written once

`stage` is where a rank writes its files, always a local folder. Steps that were set aside are no longer listed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.checkpoint.steps import list_steps, read_manifest, step_name, step_path
from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST, seal_manifest

ATTEMPT = ".attempt-"
DAMAGED = ".damaged-"
PURGED = ".purged-"


@dataclass(frozen=True)
class Attempt:
    """One save: `path` is what its files have before the commit, `stage` the local folder to write them to."""

    step: int
    id: str
    path: str
    stage: str


class StepFolder(Protocol):
    """All but deliver() are for rank 0 alone. Every method raises OSError where the storage fails."""

    folder: str

    def begin(self, step: int, attempt_id: str) -> Attempt: ...

    def deliver(self, attempt: Attempt, names: list[str]) -> None:
        """Make this rank's files durable at the attempt's path."""

    def commit(self, attempt: Attempt, manifest: dict[str, Any]) -> None:
        """Raises FileExistsError when the step is committed already: a step is never written again."""

    def discard(self, attempt: Attempt) -> None: ...

    def remove(self, step: int) -> None: ...

    def set_aside(self, step: int) -> str: ...

    def remove_attempts(self) -> None: ...


def step_folder(folder: str, staging: str) -> StepFolder:
    """`staging` is a local folder, needed for object stores alone."""
    return LocalFolder(folder) if storage.is_local(folder) else ObjectFolder(folder, staging)


class LocalFolder:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def begin(self, step: int, attempt_id: str) -> Attempt:
        path = storage.join(self.folder, f"{ATTEMPT}{step:08d}-{attempt_id}")
        return Attempt(step, attempt_id, path, path)

    def deliver(self, attempt: Attempt, names: list[str]) -> None:
        storage.sync_folder(attempt.path)

    def commit(self, attempt: Attempt, manifest: dict[str, Any]) -> None:
        path = step_path(self.folder, attempt.step)
        storage.publish_text(storage.join(attempt.path, MANIFEST), seal_manifest({**manifest, "attempt": ""}))
        if os.path.lexists(path):
            raise FileExistsError(f"{path} is already committed")
        os.rename(attempt.path, path)  # onto a folder that is not empty it fails, whoever made that in the meantime
        storage.sync_folder(self.folder)

    def discard(self, attempt: Attempt) -> None:
        shutil.rmtree(attempt.path, ignore_errors=True)

    def remove(self, step: int) -> None:
        """In one move out of the list; a removal that is interrupted leaves no half step."""
        path = storage.join(self.folder, f"{PURGED}{step:08d}-{uuid.uuid4().hex[:8]}")
        os.rename(step_path(self.folder, step), path)
        shutil.rmtree(path)

    def set_aside(self, step: int) -> str:
        path = storage.join(self.folder, f"{DAMAGED}{step:08d}-{uuid.uuid4().hex[:8]}")
        os.rename(step_path(self.folder, step), path)
        return path

    def remove_attempts(self) -> None:
        for name in storage.list_folder(self.folder):
            if name.startswith((ATTEMPT, PURGED)):
                shutil.rmtree(storage.join(self.folder, name))


class ObjectFolder:
    def __init__(self, folder: str, staging: str) -> None:
        self.folder, self._staging = folder, staging

    def begin(self, step: int, attempt_id: str) -> Attempt:
        path = storage.join(step_path(self.folder, step), attempt_id)
        return Attempt(step, attempt_id, path, os.path.join(self._staging, f"{step_name(step)}-{attempt_id}"))

    def deliver(self, attempt: Attempt, names: list[str]) -> None:
        for name in names:
            storage.move_file(os.path.join(attempt.stage, name), storage.join(attempt.path, name))

    def commit(self, attempt: Attempt, manifest: dict[str, Any]) -> None:
        path = storage.join(step_path(self.folder, attempt.step), MANIFEST)
        storage.publish_once(path, seal_manifest({**manifest, "attempt": attempt.id}))
        shutil.rmtree(attempt.stage, ignore_errors=True)

    def discard(self, attempt: Attempt) -> None:
        shutil.rmtree(attempt.stage, ignore_errors=True)
        storage.remove(attempt.path)

    def remove(self, step: int) -> None:
        """The manifest first: without it the step is gone, whatever happens to the rest."""
        path = step_path(self.folder, step)
        storage.remove(storage.join(path, MANIFEST))
        storage.remove(path)

    def set_aside(self, step: int) -> str:
        path = step_path(self.folder, step)
        aside = storage.join(path, f"damaged-{uuid.uuid4().hex[:8]}.json")
        storage.publish_text(aside, storage.read_text(storage.join(path, MANIFEST)))
        storage.remove(storage.join(path, MANIFEST))
        return aside

    def remove_attempts(self) -> None:
        """Of steps that are not committed; what a damaged step has left stays."""
        committed = {step_name(step) for step in list_steps(self.folder)}
        for name in storage.list_folder(self.folder):
            path = storage.join(self.folder, name)
            if name not in committed and name.startswith("step_"):
                entries = storage.list_folder(path)
                if not any(entry.startswith("damaged-") for entry in entries):
                    storage.remove(path)
            elif name in committed:
                self._remove_others(path)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _remove_others(self, path: str) -> None:
        try:
            kept = {MANIFEST, read_manifest(path)["attempt"]}
        except DamagedError:
            return  # who knows which files are its own
        for entry in storage.list_folder(path):
            if entry not in kept and not entry.startswith("damaged-"):
                storage.remove(storage.join(path, entry))
