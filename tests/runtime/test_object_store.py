"""An object store that fails is never taken for one that is empty, and no object is half there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.runtime.storage import storage
from tests.support.messages import names
from tests.support.object_store import FaultyProxy, store, use_store  # noqa: F401

FOLDER = "s3://bucket/runs/a"
PATH = f"{FOLDER}/x"


def _times(fault: str, count: int) -> object:
    left = [count]

    def plant(method: str, path: str) -> str:
        left[0] -= 1
        return fault if left[0] >= 0 else ""

    return plant


def test_files_are_written_listed_read_in_parts_and_removed(store: FaultyProxy, tmp_path: Path) -> None:  # noqa: F811
    content = os.urandom(3_000_000)
    (tmp_path / "x").write_bytes(content)
    storage.move_file(str(tmp_path / "x"), PATH)
    storage.publish_text(f"{FOLDER}/deep/y.json", "first ä\r\n")
    assert storage.list_folder(FOLDER) == ["deep", "x"]
    assert storage.read_text(f"{FOLDER}/deep/y.json") == "first ä\r\n"
    assert storage.size_bytes(PATH) == len(content)
    with storage.open_file(PATH, "rb") as file:
        file.seek(1_000_000)
        part = bytearray(500_000)
        assert file.readinto(part) == 500_000 and bytes(part) == content[1_000_000:1_500_000]
        file.seek(2_999_990)
        assert file.readinto(part) == 10
    storage.remove(FOLDER)
    assert not storage.exists(PATH) and storage.list_folder(FOLDER) == []


@pytest.mark.long
@pytest.mark.parametrize("fault", ["503", "500", "reset", "slow", "truncated"])
def test_passing_faults_are_retried(store: FaultyProxy, tmp_path: Path, fault: str) -> None:  # noqa: F811
    content = os.urandom(300_000)
    (tmp_path / "x").write_bytes(content)
    store.faults = _times(fault, 2)
    storage.move_file(str(tmp_path / "x"), PATH)
    store.faults = _times(fault, 2)
    with storage.open_file(PATH, "rb") as file:
        assert file.read() == content
    store.faults = _times(fault, 2)
    assert storage.exists(PATH) and storage.list_folder(FOLDER) == ["x"]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["503", "reset", "403"])
def test_lasting_faults_are_errors_with_path_and_bytes_and_403_at_once(
    store: FaultyProxy,  # noqa: F811
    tmp_path: Path,
    fault: str,
) -> None:
    storage.publish_text(PATH, "kept")
    use_store(store.url, attempts=2)
    store.faults = lambda method, path: fault
    (tmp_path / "x").write_bytes(b"0" * 12_345)
    for action in (
        lambda: storage.exists(PATH),
        lambda: storage.read_text(PATH),
        lambda: storage.list_folder(FOLDER),
        lambda: storage.publish_text(PATH, "new"),
        lambda: storage.publish_once(f"{FOLDER}/y", "new"),
    ):
        planted = store.counts.get(fault, 0)
        with pytest.raises(OSError, match=FOLDER):
            action()
        if fault == "403":
            assert store.counts[fault] == planted + 1  # not tried again
    with pytest.raises(OSError, match=names("12,345 s3://bucket/runs/a/x")):
        storage.move_file(str(tmp_path / "x"), PATH)
    store.faults = lambda method, path: ""
    assert storage.read_text(PATH) == "kept" and (tmp_path / "x").exists()


def test_an_error_in_the_writing_code_leaves_no_object(store: FaultyProxy) -> None:  # noqa: F811
    for mode in ("w", "wb"):
        with pytest.raises(ZeroDivisionError), storage.open_file(PATH, mode) as file:
            file.write("half" if mode == "w" else b"half")
            raise ZeroDivisionError
    assert not storage.exists(PATH)


@pytest.mark.parametrize("fault", ["", "lost", "reset", "503"])
def test_a_file_is_published_once_even_if_the_answer_is_lost(store: FaultyProxy, fault: str) -> None:  # noqa: F811
    store.faults = _times(fault, 1)
    storage.publish_once(PATH, "mine")
    with pytest.raises(FileExistsError):
        storage.publish_once(PATH, "theirs")
    assert storage.read_text(PATH) == "mine"


def test_one_key_in_two_buckets_is_two_files(store: FaultyProxy) -> None:  # noqa: F811
    storage.path_manager()._path_handlers["s3://"]._get_client("other").create_bucket(Bucket="other")
    for bucket in ("bucket", "other"):
        storage.publish_text(f"s3://{bucket}/same-key", bucket)
    for bucket in ("bucket", "other"):
        assert Path(storage.local_path(f"s3://{bucket}/same-key")).read_text() == bucket
