"""Publish folders and files completely or not at all.

A folder is written as an attempt under another name. Its manifest is the last file and commits it:

    on a disk           <parent>/.attempt-<name>-<id>/...   renamed to <parent>/<name>/
    in an object store  <parent>/<name>/<id>/...            committed by <parent>/<name>/manifest.json

A killed process leaves an attempt, which no process reads. If one process at a time writes (it
holds a lease), the next writer calls remove_leftovers(). If many processes write at the same time,
each locks a file for its attempt (locked_attempt); an attempt whose lock is free was abandoned.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pipeline.runtime.errors import DamagedError
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import FileEntry, checksums_of, copy_file
from pipeline.runtime.storage.manifest import MANIFEST, read_sealed

ATTEMPT, PURGED, DAMAGED = ".attempt-", ".purged-", ".damaged-"
DAMAGED_MANIFEST = "damaged-"  # what is left of the manifest of a folder that was set aside in an object store
LOCK = ".lock"

Fence = Callable[[], None]  # raises OSError where this process may commit no more: Lease.check


@dataclass(frozen=True)
class Attempt:
    """A folder that is being written.

    path: the files' path before the commit; stage: the local folder to write to; below: the part of the
    path below the committed folder, empty if the files are in that folder.
    """

    name: str
    path: str
    stage: str
    below: str = ""


class PublishedFolders(Protocol):
    """The folders of one parent that are committed completely. Methods raise OSError.

    Only one process calls these methods, except deliver(), because several processes may write
    files of one attempt.
    """

    parent: str

    def begin(self, name: str, attempt_id: str = "") -> Attempt: ...

    def add(self, attempt: Attempt, name: str, source: str) -> FileEntry:
        """Copy the local file `source` into the attempt. Return the entry of the copied bytes."""

    def deliver(self, attempt: Attempt, names: list[str]) -> None:
        """Move the staged files `names` to the attempt's path, where they are durable."""

    def commit(self, attempt: Attempt, manifest: str, fence: Fence | None = None) -> str:
        """Commit the attempt and return the path of the committed folder. Raises FileExistsError if it exists."""

    def discard(self, attempt: Attempt) -> None: ...

    def remove(self, name: str) -> None:
        """Remove a folder. It leaves the published folders in one step, so it never appears incomplete."""

    def set_aside(self, name: str) -> str:
        """Remove a folder from the list of published folders, but keep it for inspection. Return its path."""

    def remove_leftovers(self) -> None:
        """Remove the files that killed attempts have left. The caller must hold the lease."""


def published_folders(
    parent: str, pattern: re.Pattern[str], *, prefix: str = "", staging: str = "", flat: bool = False
) -> PublishedFolders:
    """Return the folders whose names match `pattern`.

    prefix: a prefix of the folders' names, which the names of attempts leave out. staging: a local
    folder for files of an object store. flat: in an object store the files are in the folder
    itself, because only one process at a time writes.
    """
    if storage.is_local(parent):
        return LocalFolders(parent, prefix)
    return ObjectFolders(parent, pattern, staging, flat)


def committed_names(parent: str, pattern: re.Pattern[str]) -> list[str]:
    """Return names sorted as text. Raises OSError if an object store does not answer, instead of returning no names."""
    names = [name for name in storage.list_folder(parent) if pattern.fullmatch(name)]
    if storage.is_local(parent):
        return names
    return [name for name in names if storage.exists(storage.join(parent, name, MANIFEST))]


class LocalFolders:
    def __init__(self, parent: str, prefix: str = "") -> None:
        self.parent, self._prefix = parent, prefix

    def begin(self, name: str, attempt_id: str = "") -> Attempt:
        path = self._aside(ATTEMPT, name, attempt_id or _fresh_id())
        return Attempt(name, path, path)

    def add(self, attempt: Attempt, name: str, source: str) -> FileEntry:
        target = storage.join(attempt.path, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        return copy_file(source, target)

    def deliver(self, attempt: Attempt, names: list[str]) -> None:
        storage.sync_folder(attempt.path)

    def commit(self, attempt: Attempt, manifest: str, fence: Fence | None = None) -> str:
        path = storage.join(self.parent, attempt.name)
        commit_folder(attempt.path, path, manifest, fence)
        return path

    def discard(self, attempt: Attempt) -> None:
        shutil.rmtree(attempt.path, ignore_errors=True)

    def remove(self, name: str) -> None:
        path = self._aside(PURGED, name, _fresh_id())
        storage.rename(storage.join(self.parent, name), path)
        shutil.rmtree(path)

    def set_aside(self, name: str) -> str:
        path = self._aside(DAMAGED, name, _fresh_id())
        storage.rename(storage.join(self.parent, name), path)
        return path

    def remove_leftovers(self) -> None:
        for name in storage.list_folder(self.parent):
            if name.startswith((ATTEMPT, PURGED)):
                shutil.rmtree(storage.join(self.parent, name))

    def _aside(self, kind: str, name: str, attempt_id: str) -> str:
        return storage.join(self.parent, f"{kind}{name.removeprefix(self._prefix)}-{attempt_id}")


class ObjectFolders:
    def __init__(self, parent: str, pattern: re.Pattern[str], staging: str = "", flat: bool = False) -> None:
        self.parent, self._pattern, self._staging, self._flat = parent, pattern, staging, flat

    def begin(self, name: str, attempt_id: str = "") -> Attempt:
        path = storage.join(self.parent, name)
        if self._flat:
            return Attempt(name, path, "")
        attempt_id = attempt_id or _fresh_id()
        stage = os.path.join(self._staging, f"{name}-{attempt_id}")
        return Attempt(name, storage.join(path, attempt_id), stage, attempt_id)

    def add(self, attempt: Attempt, name: str, source: str) -> FileEntry:
        entry = checksums_of(source)
        storage.upload_file(source, storage.join(attempt.path, name))
        return entry

    def deliver(self, attempt: Attempt, names: list[str]) -> None:
        for name in names:
            storage.move_file(os.path.join(attempt.stage, name), storage.join(attempt.path, name))

    def commit(self, attempt: Attempt, manifest: str, fence: Fence | None = None) -> str:
        path = storage.join(self.parent, attempt.name)
        if fence is not None:
            fence()
        storage.publish_once(storage.join(path, MANIFEST), manifest)
        _remove_stage(attempt.stage)
        return path

    def discard(self, attempt: Attempt) -> None:
        _remove_stage(attempt.stage)
        if not self._flat:  # a flat folder may be another writer's by now; remove_leftovers() has the lease
            storage.remove(attempt.path)

    def remove(self, name: str) -> None:
        path = storage.join(self.parent, name)
        storage.remove(storage.join(path, MANIFEST))  # without it there is no such folder
        storage.remove(path)

    def set_aside(self, name: str) -> str:
        path = storage.join(self.parent, name)
        aside = storage.join(path, f"{DAMAGED_MANIFEST}{_fresh_id()}.json")
        storage.publish_text(aside, storage.read_text(storage.join(path, MANIFEST)))
        storage.remove(storage.join(path, MANIFEST))
        return aside

    def remove_leftovers(self) -> None:
        """Remove leftovers of killed attempts. Files of damaged folders stay."""
        committed = set(committed_names(self.parent, self._pattern))
        for name in filter(self._pattern.fullmatch, storage.list_folder(self.parent)):
            path = storage.join(self.parent, name)
            if name in committed:
                self._remove_other_attempts(path)
            elif not any(entry.startswith(DAMAGED_MANIFEST) for entry in storage.list_folder(path)):
                storage.remove(path)
        _remove_stage(self._staging)

    def _remove_other_attempts(self, path: str) -> None:
        if self._flat:
            return
        try:
            kept = {MANIFEST, read_sealed(storage.join(path, MANIFEST), None)["attempt"]}
        except (DamagedError, KeyError, TypeError):
            return  # nobody knows which files are its own
        for entry in storage.list_folder(path):
            if entry not in kept and not entry.startswith(DAMAGED_MANIFEST):
                storage.remove(storage.join(path, entry))


def commit_folder(attempt: str, target: str, manifest: str, fence: Fence | None = None) -> None:
    """Write the manifest, make the local folder `attempt` durable, and rename it to `target`.

    Raises FileExistsError if another process has made `target` in the meantime.
    """
    for folder, _, _ in os.walk(attempt):
        storage.sync_folder(folder)
    storage.publish_text(storage.join(attempt, MANIFEST), manifest)
    if fence is not None:
        fence()
    if os.path.lexists(target):
        raise FileExistsError(f"{target} is already there")
    try:
        storage.rename(attempt, target)
    except OSError as error:  # onto a folder that is not empty it fails, whoever made that in the meantime
        if error.errno != errno.ENOTEMPTY:
            raise
        raise FileExistsError(f"{target} is already there") from error
    storage.sync_folder(os.path.dirname(target))


@contextmanager
def locked_attempt(parent: str, prefix: str) -> Iterator[str]:
    """Yield a new folder <parent>/<prefix><id>, for a process that shares `parent` with other
    processes. The folder is removed at the end; folders of ended processes are removed at the
    beginning.
    """
    os.makedirs(parent, exist_ok=True)
    remove_abandoned(parent, prefix)
    path = os.path.join(parent, f"{prefix}{_fresh_id()}")
    with _locked(path + LOCK):
        try:
            os.mkdir(path)
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a lock file of this process, and remove the file at the end."""
    with open(path, "x") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not os.path.exists(path):  # another process took it for an abandoned one before it was locked
                raise FileNotFoundError(f"{path} was removed by another process: start this one again")
            yield
        finally:
            storage.remove(path)


def remove_abandoned(parent: str, prefix: str) -> None:
    """Remove the attempts whose process has ended: their lock is free, or the lock file is missing."""
    for name in storage.list_folder(parent):
        path = os.path.join(parent, name).removesuffix(LOCK)
        if not name.startswith(prefix):
            continue
        try:
            with open(path + LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_with_lock(path)
        except BlockingIOError:
            pass  # its process is at work
        except FileNotFoundError:
            _remove_with_lock(path)


def _remove_with_lock(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    storage.remove(path + LOCK)


def make_durable(path: str) -> None:
    """Wait until the bytes of a local file are on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def publish_file(staged: str, path: str) -> None:
    """Move a finished local file to `path`, where it appears complete and durable. Replaces an old file."""
    make_durable(staged)
    storage.make_folder(storage.dirname(path))
    storage.move_file(staged, path)
    if storage.is_local(path):
        storage.sync_folder(storage.dirname(path))


def _fresh_id() -> str:
    return uuid.uuid4().hex[:8]


def _remove_stage(stage: str) -> None:
    if stage:
        shutil.rmtree(stage, ignore_errors=True)
