"""Folders at predictable names are this user's alone, and locks do not follow links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.prepare import PrepareJob
from pipeline.data.prepare.run import staging_folder
from pipeline.runtime.errors import ConfigError
from pipeline.runtime.process.processes import LOCK, only_one_run
from pipeline.runtime.storage import private, storage
from pipeline.runtime.storage.private import private_folder
from tests.support.messages import names


def test_a_private_folder_is_made_with_mode_700_and_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        folder = Path(private_folder(str(tmp_path / "own")))
        assert folder.lstat().st_mode & 0o777 == 0o700


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    (tmp_path / "link").symlink_to(private_folder(str(tmp_path / "own")))
    (tmp_path / "file").touch()
    for name in ("open", "link", "file"):
        with pytest.raises(ConfigError, match=names(f"{tmp_path}/{name}")):
            private_folder(str(tmp_path / name))
    other = os.getuid() + 1
    monkeypatch.setattr(private.os, "getuid", lambda: other)
    with pytest.raises(ConfigError, match=names(f"{tmp_path}/own {other}")):
        private_folder(str(tmp_path / "own"))


def test_a_link_in_the_place_of_a_lock_is_refused_and_its_file_keeps_its_bytes(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for lock in (tmp_path / LOCK, tmp_path / "pointer.json.lock"):
        lock.symlink_to(precious)
    with pytest.raises(ConfigError, match=names(str(tmp_path / LOCK))), only_one_run(str(tmp_path), "preparing"):
        pass
    with pytest.raises(ConfigError):
        storage.swap_text(str(tmp_path / "pointer.json"), None, "text")
    assert precious.read_text() == "precious"


def test_prepare_to_an_object_store_stages_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.tempfile, "tempdir", str(tmp_path))
    job = load_config(PrepareJob, ["data=quickstart", "data.path=s3://bucket/ds", "source=x"])
    folder = Path(staging_folder(job)).parent
    assert folder.parent == tmp_path and folder.lstat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=names(str(folder))):
        staging_folder(job)
