"""A folder or file is published whole or not at all, on disks and in object stores, and leftovers are removed."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest

from pipeline.runtime.storage import atomic, storage
from pipeline.runtime.storage.atomic import PublishedFolders, committed_names, published_folders
from pipeline.runtime.storage.lease import LeaseLostError
from pipeline.runtime.storage.manifest import seal_manifest
from pipeline.runtime.storage.signature import Purpose
from tests.support.object_store import BUCKET, store

__all__ = ["store"]
NAMES = re.compile(r"item_\d+")
MANIFEST = seal_manifest({"attempt": ""}, Purpose.STEP)


@pytest.fixture(params=["local", "nested objects", "flat objects"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> PublishedFolders:
    parent = str(tmp_path / "parent")
    if request.param != "local":
        request.getfixturevalue("store")
        parent = f"s3://{BUCKET}/parent"
    flat = request.param == "flat objects"
    return published_folders(parent, NAMES, prefix="item_", staging=str(tmp_path / "stage"), flat=flat)


def _publish(folders: PublishedFolders, name: str, source: Path, fence: atomic.Fence | None = None) -> str:
    attempt = folders.begin(name)
    folders.add(attempt, "part/a.bin", str(source))
    assert name not in committed_names(folders.parent, NAMES), "an attempt is listed before its commit"
    return folders.commit(attempt, seal_manifest({"attempt": attempt.below}, Purpose.STEP), fence)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"content")
    return path


def test_a_folder_appears_with_its_commit_and_is_never_written_again(folders: PublishedFolders, source: Path) -> None:
    assert _publish(folders, "item_1", source) == storage.join(folders.parent, "item_1")
    assert committed_names(folders.parent, NAMES) == ["item_1"]
    second = folders.begin("item_1")
    source.write_bytes(b"changed")
    if "://" not in folders.parent:
        folders.add(second, "part/a.bin", str(source))
    with pytest.raises(FileExistsError):
        folders.commit(second, seal_manifest({"attempt": "another"}, Purpose.STEP))
    folders.discard(second)
    folders.remove_leftovers()
    assert committed_names(folders.parent, NAMES) == ["item_1"]


def test_a_lost_lease_keeps_an_attempt_from_being_committed(folders: PublishedFolders, source: Path) -> None:
    def fence() -> None:
        raise LeaseLostError("another run holds the folder")

    with pytest.raises(LeaseLostError):
        _publish(folders, "item_1", source, fence)
    assert committed_names(folders.parent, NAMES) == []
    folders.remove_leftovers()
    assert storage.list_folder(folders.parent) == []


def test_what_a_killed_attempt_left_is_removed_and_what_is_committed_stays(
    folders: PublishedFolders, source: Path
) -> None:
    _publish(folders, "item_1", source)
    folders.add(folders.begin("item_2"), "part/a.bin", str(source))
    folders.remove_leftovers()
    assert storage.list_folder(folders.parent) == ["item_1"]
    folders.remove("item_1")
    assert storage.list_folder(folders.parent) == []


def test_a_folder_that_is_set_aside_is_kept_but_not_listed(folders: PublishedFolders, source: Path) -> None:
    aside = folders.set_aside(_publish(folders, "item_1", source).rpartition("/")[2])
    folders.remove_leftovers()
    assert committed_names(folders.parent, NAMES) == []
    assert storage.exists(aside) or storage.is_folder(aside)


def test_all_files_names_and_folders_are_durable_before_the_rename(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda handle: (events.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    monkeypatch.setattr(os, "rename", lambda *ends: (events.append("rename"), rename(*ends)))
    folders = published_folders(str(tmp_path / "parent"), NAMES)
    attempt = folders.begin("item_1", "id")
    folders.add(attempt, "part/a.bin", str(source))
    folders.commit(attempt, MANIFEST)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {attempt.path, f"{attempt.path}/part", f"{attempt.path}/part/a.bin"} <= set(before)
    assert any("manifest.json" in path for path in before)
    assert after == [str(tmp_path / "parent")]


def _hold(parent: str, ready: str) -> None:
    with atomic.locked_attempt(parent, ".work-") as path:
        Path(path, "file").touch()
        Path(ready).touch()
        signal.pause()


def test_an_attempt_is_removed_when_its_process_has_ended_and_not_before(tmp_path: Path) -> None:
    parent, ready = str(tmp_path / "parent"), tmp_path / "ready"
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(parent, str(ready)))
    process.start()
    while not ready.exists():
        assert process.is_alive()
    atomic.remove_abandoned(parent, ".work-")
    assert len(os.listdir(parent)) == 2, "the folder and the lock of a process at work stay"
    process.kill()
    process.join()
    with atomic.locked_attempt(parent, ".work-") as path:
        assert sorted(os.listdir(parent)) == sorted([os.path.basename(path), os.path.basename(path) + ".lock"])
    assert os.listdir(parent) == []


def test_a_file_is_published_with_its_folder(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "new" / "folder" / "file"
    atomic.publish_file(str(source), str(target))
    assert target.read_bytes() == b"content" and not source.exists()
