"""Turn a folder that is being written into an artifact, by one rename, or into nothing.

<parent>/.export-<id>/       until the commit
<parent>/.export-<id>.lock   held by the process that writes it
<output>                     after the commit, with a manifest that was written last

A killed export leaves the first, which nothing loads; the next export into the same parent takes it away.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.runtime.storage import storage
from pipeline.runtime.storage.manifest import MANIFEST
from pipeline.serving.artifact.manifest import UNFINISHED

LOCK, SCRATCH = ".lock", "scratch"
FOLDERS = ("tables", "vocabulary")


@dataclass(frozen=True)
class Attempt:
    """`path` is where the artifact's files are written; `scratch` holds what is not of the artifact."""

    path: str
    output: str

    @property
    def scratch(self) -> str:
        return os.path.join(self.path, SCRATCH)

    def commit(self, manifest: str) -> None:
        """Raises FileExistsError where somebody else has made the output in the meantime."""
        shutil.rmtree(self.scratch)
        for folder in FOLDERS:
            storage.sync_folder(os.path.join(self.path, folder))
        storage.publish_text(os.path.join(self.path, MANIFEST), manifest)
        storage.sync_folder(self.path)
        if os.path.lexists(self.output):
            raise FileExistsError(f"{self.output} is already there")
        os.rename(self.path, self.output)
        storage.sync_folder(os.path.dirname(self.output))


@contextmanager
def attempt(output: str) -> Iterator[Attempt]:
    """A fresh folder beside `output`; what is left of it is removed at the end, whatever the end is."""
    output = os.path.abspath(output)
    parent = os.path.dirname(output)
    os.makedirs(parent, exist_ok=True)
    remove_abandoned(parent)
    path = os.path.join(parent, f"{UNFINISHED}{uuid.uuid4().hex[:8]}")
    with _locked(path + LOCK):
        try:
            for folder in ("", *FOLDERS, SCRATCH):
                os.mkdir(os.path.join(path, folder))
            yield Attempt(path, output)
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """A lock file of this process; gone at the end."""
    with open(path, "x") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not os.path.exists(path):  # taken for an abandoned one before it was locked
                raise FileNotFoundError(f"{path} was removed by another export: start this one again")
            yield
        finally:
            storage.remove(path)


def remove_abandoned(parent: str) -> None:
    """Those whose process has ended: their lock is free, or gone."""
    for name in storage.list_folder(parent):
        path = os.path.join(parent, name).removesuffix(LOCK)
        if not name.startswith(UNFINISHED):
            continue
        try:
            with open(path + LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        except BlockingIOError:
            pass  # another export is at work
        except FileNotFoundError:
            _remove(path)


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    storage.remove(path + LOCK)
