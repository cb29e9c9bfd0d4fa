"""Find the folders that hold models and data, and replace a folder by a rewritten one.

A folder is rewritten in .erase-<name> next to it. Files that do not change are hard links. When it is complete, two
renames replace the folder. recover() finishes or undoes what a killed process has left:

    .erase-<name>     not complete, unless <name> is missing
    .erased-<name>    the folder before it was rewritten
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.checkpoint.steps import STEP_FOLDER
from pipeline.data.dataset import FILE_NAME
from pipeline.data.prepare.write_dataset import QUARANTINE_FILE
from pipeline.runtime.errors import UserError
from pipeline.runtime.storage import atomic, storage
from pipeline.runtime.storage.manifest import MANIFEST

STAGED, OLD = ".erase-", ".erased-"
VERSION = re.compile(r"v\d{6,15}")
LEFTOVERS = (atomic.ATTEMPT, atomic.PURGED, atomic.DAMAGED)


class EraseError(UserError):
    """Something cannot be erased. The message says what, and how to proceed."""


@dataclass
class Places:
    """Lists what the given folders contain. `checkpoints` are folders of steps, `leftovers` are folders of killed or
    damaged saves, `files` are all other files."""

    datasets: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    checkpoints: list[str] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


def recover(root: str) -> None:
    """Finish or undo replacements of `root`, and of folders below it, that a killed process has left."""
    parent, own = os.path.split(os.path.abspath(root))
    beside = os.listdir(parent) if os.path.isdir(parent) else []
    _recover_in(parent, [name for name in beside if name in (STAGED + own, OLD + own)])
    for folder, names, _ in os.walk(root):
        _recover_in(folder, names)
        names[:] = [name for name in sorted(os.listdir(folder)) if os.path.isdir(os.path.join(folder, name))]


def _recover_in(folder: str, names: list[str]) -> None:
    for old in [name for name in names if name.startswith(OLD)]:
        path = os.path.join(folder, old.removeprefix(OLD))
        staged = os.path.join(folder, STAGED + old.removeprefix(OLD))
        if not os.path.exists(path):
            os.rename(staged if os.path.exists(staged) else os.path.join(folder, old), path)
        shutil.rmtree(os.path.join(folder, old), ignore_errors=True)
    for staged in [name for name in names if name.startswith(STAGED)]:
        shutil.rmtree(os.path.join(folder, staged), ignore_errors=True)


def find_places(roots: Iterable[str]) -> Places:
    """Find what the folders hold."""
    found = Places()
    for root in roots:
        if not os.path.lexists(root):
            raise EraseError(f"there is no {root}: give the folder's present path, or leave it out of folders")
        if os.path.isfile(root):
            found.files.append(root)
            continue
        for folder, names, files in os.walk(root):
            for name in [name for name in names if name.startswith(LEFTOVERS)]:
                found.leftovers.append(os.path.join(folder, name))
                names.remove(name)
            kind = _kind(folder, names, files)
            if kind is None:
                found.files += [os.path.join(folder, name) for name in files if ".lease" not in folder]
            else:
                if QUARANTINE_FILE in files:
                    found.files.append(os.path.join(folder, QUARANTINE_FILE))
                kind_list: list[str] = getattr(found, kind)
                kind_list.append(folder)
                names.clear()
            names.sort()
    return found


def _kind(folder: str, names: list[str], files: list[str]) -> str | None:
    if MANIFEST in files and VERSION.fullmatch(os.path.basename(folder)):
        return "versions"
    if FILE_NAME in files:
        return "datasets"
    if any(STEP_FOLDER.fullmatch(name) for name in names):
        return "checkpoints"
    return "artifacts" if MANIFEST in files and "tables" in names else None


class Rewritten:
    """A folder that is being rewritten at `staged`. Its files are links to the files of `path` until they are replaced."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        parent, name = os.path.split(os.path.abspath(path))
        self.staged, self._old = os.path.join(parent, STAGED + name), os.path.join(parent, OLD + name)
        shutil.rmtree(self.staged, ignore_errors=True)
        for folder, _, files in os.walk(self.path):
            below = os.path.normpath(os.path.join(self.staged, os.path.relpath(folder, self.path)))
            os.makedirs(below)
            for file in files:
                os.link(os.path.join(folder, file), os.path.join(below, file))

    def new(self, name: str) -> str:
        """Return the path of a file that will be written instead of `name`. It does not exist."""
        path = os.path.join(self.staged, name)
        os.remove(path)
        return path

    def changed(self, name: str) -> bool:
        return not os.path.samefile(os.path.join(self.path, name), os.path.join(self.staged, name))

    @property
    def is_changed(self) -> bool:
        return any(
            self.changed(os.path.relpath(os.path.join(folder, name), self.path))
            for folder, _, names in os.walk(self.path)
            for name in names
        )

    def commit(self) -> bool:
        """Replace the folder, if a file was replaced. Return whether it was."""
        if not self.is_changed:
            shutil.rmtree(self.staged)
            return False
        for folder, _, _ in os.walk(self.staged):
            storage.sync_folder(folder)
        os.rename(self.path, self._old)
        os.rename(self.staged, self.path)
        storage.sync_folder(os.path.dirname(self._old))
        shutil.rmtree(self._old)
        return True


@contextmanager
def rewriting(path: str) -> Iterator[Rewritten]:
    """Yield a rewritten folder, which is removed unless commit() has replaced `path` by it."""
    folder = Rewritten(path)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.staged, ignore_errors=True)
