"""Files appear whole or not at all, locally and behind an iopath handler."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.runtime.storage import storage
from tests.support.memory_store import ObjectStore
from tests.support.messages import names


@pytest.fixture(params=["local", "remote"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path)
        return
    store = ObjectStore(tmp_path)
    store.objects = {"folder/": b""}  # the marker that iopath's mkdirs leaves
    storage.path_manager().register_handler(store)
    yield "test://bucket/folder"
    del storage.path_manager()._path_handlers["test://"]


def test_published_text_is_read_back_and_replaced_whole(folder: str) -> None:
    path = storage.join(folder, "plan.json")
    assert not storage.exists(path)
    storage.publish_text(path, "first ä\r\n")
    storage.publish_text(path, "second ö\r\nline")
    assert storage.read_text(path) == "second ö\r\nline"
    assert storage.list_folder(folder) == ["plan.json"]
    assert storage.size_bytes(path) == len("second ö\r\nline".encode())


def test_checksum_equals_hashlib_over_many_chunks(folder: str) -> None:
    path, content = storage.join(folder, "bytes"), os.urandom(3 * storage.CHUNK_BYTES + 17)
    with storage.open_file(path, "wb") as file:
        file.write(content)
    assert storage.sha256_of(path) == hashlib.sha256(content).hexdigest()
    assert Path(storage.local_path(path)).read_bytes() == content


def test_folders_are_made_listed_and_removed_with_their_content(folder: str) -> None:
    deep = storage.join(folder, "a", "b")
    storage.make_folder(deep)
    storage.publish_text(storage.join(deep, "x"), "1")
    storage.publish_text(storage.join(folder, "a", "y"), "2")
    assert storage.is_folder(deep) and storage.is_file(storage.join(deep, "x"))
    assert storage.list_folder(storage.join(folder, "a")) == ["b", "y"]
    storage.remove(storage.join(folder, "a"))
    assert not storage.exists(storage.join(deep, "x")) and not storage.exists(storage.join(folder, "a", "y"))
    storage.remove(storage.join(folder, "a", "y"))  # nothing there: nothing happens
    assert storage.list_folder(storage.join(folder, "absent")) == []


def test_local_file_is_moved_into_the_store(folder: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = tmp_path_factory.mktemp("staging") / "shard"
    for content in ("old", "new"):
        source.write_text(content)
        storage.move_file(str(source), storage.join(folder, "shard"))
        assert not source.exists()
        assert storage.read_text(storage.join(folder, "shard")) == content


def test_failed_upload_is_an_error_though_iopath_only_logs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = ObjectStore(tmp_path)
    monkeypatch.setattr(handler, "_copy_from_local", lambda *_, **__: False)
    storage.path_manager().register_handler(handler)
    (tmp_path / "x").write_text("kept")
    try:
        with pytest.raises(OSError):
            storage.move_file(str(tmp_path / "x"), "test://bucket/y")
        assert (tmp_path / "x").read_text() == "kept"
    finally:
        del storage.path_manager()._path_handlers["test://"]


def test_failed_publish_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dataset.json"
    storage.publish_text(str(path), "old")

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        storage.publish_text(str(path), "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["dataset.json"]


def test_scheme_without_handler_is_refused_instead_of_becoming_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=names("gs://")):
        storage.exists("gs://bucket/x")
