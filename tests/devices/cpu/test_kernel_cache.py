"""Compiled kernels have a folder though the installation, the home and the image's own cache are read-only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.container import as_container
from pipeline.devices.cpu import process as kernel_cache
from pipeline.devices.cpu.kernels.parts import remove_stale_kernels
from pipeline.devices.cpu.process import KERNEL_CACHE, OTHER_CACHES, find_kernel_cache, find_other_caches


def _writable(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setattr(kernel_cache.os, "access", lambda path, mode: Path(path) in folders)


def test_what_an_image_has_compiled_is_copied_where_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "image" / "tables_1").mkdir(parents=True)
    (tmp_path / "image" / "tables_1" / "kernel.nbi").write_text("compiled")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv(KERNEL_CACHE, str(tmp_path / "image"))
    _writable(monkeypatch, tmp_path / "tmp")
    for _ in range(2):  # and of a second rank
        find_kernel_cache()
        assert os.environ[KERNEL_CACHE] == str(tmp_path / "tmp" / f"numba-{os.getuid()}")
        assert (Path(os.environ[KERNEL_CACHE]) / "tables_1" / "kernel.nbi").read_text() == "compiled"
        monkeypatch.setenv(KERNEL_CACHE, str(tmp_path / "image"))
    assert [each.name for each in (tmp_path / "tmp").iterdir()] == [f"numba-{os.getuid()}"]


def test_a_folder_that_can_be_written_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_CACHE, str(tmp_path / "not" / "there"))
    _writable(monkeypatch, tmp_path)
    find_kernel_cache()
    assert os.environ[KERNEL_CACHE] == str(tmp_path / "not" / "there")
    monkeypatch.delenv(KERNEL_CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_kernel_cache()
    assert KERNEL_CACHE not in os.environ
    _writable(monkeypatch)
    find_kernel_cache()
    assert os.environ[KERNEL_CACHE].endswith(f"numba-{os.getuid()}")


def test_kernels_of_another_user_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are pickles, which run when Numba reads them."""
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(KERNEL_CACHE, raising=False)
    _writable(monkeypatch)
    taken = tmp_path / f"numba-{os.getuid()}"
    for prepared in ("open to others", "a link"):
        if prepared == "a link":
            taken.rename(tmp_path / "elsewhere")
            taken.symlink_to(tmp_path / "elsewhere")
        else:
            taken.mkdir()
            taken.chmod(0o777)
        find_kernel_cache()
        own = Path(os.environ[KERNEL_CACHE])
        assert own != taken and own.lstat().st_mode & 0o777 == 0o700, prepared
        monkeypatch.delenv(KERNEL_CACHE)
    shared = tmp_path / "shared"
    (shared / "tables_1").mkdir(parents=True)
    (shared / "tables_1").chmod(0o777)
    monkeypatch.setenv(KERNEL_CACHE, str(shared))
    taken.unlink()
    _writable(monkeypatch, shared)
    find_kernel_cache()
    assert os.environ[KERNEL_CACHE] == str(taken) and not list(taken.iterdir())


def test_kernels_older_than_the_parts_that_they_inline_are_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "room" / "__pycache__").mkdir(parents=True)
    old, new = (tmp_path / "room" / "__pycache__" / f"{name}.nbi" for name in ("old", "new"))
    for index in (old, new):
        index.touch()
    os.utime(old, (1, 1))
    remove_stale_kernels(tmp_path)
    assert not old.exists() and new.exists()


@pytest.mark.campaign
def test_kernels_load_in_a_container_whose_root_is_read_only(tmp_path: Path) -> None:
    """RUNC=/usr/sbin/runc pytest -m campaign tests/devices/cpu/test_kernel_cache.py, as root."""
    runc = os.environ.get("RUNC") or shutil.which("runc")
    if not runc or os.geteuid():
        pytest.skip("no container can be started: RUNC names no runc and the PATH has none, or this is not root")
    environ = {key: value for key, value in os.environ.items() if key not in (KERNEL_CACHE, "XDG_CACHE_HOME")}
    for find, code in (("pass", 1), ("find_kernel_cache()", 0)):
        source = f"from pipeline.devices.cpu.process import find_kernel_cache; {find}; import pipeline.devices.cpu.kernels.lookup"
        (folder := tmp_path / str(code)).mkdir()
        command = as_container(runc, [sys.executable, "-c", source], environ, folder)
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, done.stderr
        assert code == 0 or "no locator available" in done.stderr


def test_caches_of_compilers_are_in_folders_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    for variable in OTHER_CACHES:
        monkeypatch.delenv(variable, raising=False)
    find_other_caches()
    for variable, name in OTHER_CACHES.items():
        assert os.environ[variable] == str(tmp_path / "tmp" / f"pipeline-{os.getuid()}" / name)
        assert os.stat(os.environ[variable]).st_mode & 0o777 == 0o700
        monkeypatch.setenv(variable, str(tmp_path / name))
    find_other_caches()
    assert {os.environ[variable] for variable in OTHER_CACHES} == {
        str(tmp_path / name) for name in OTHER_CACHES.values()
    }
    (tmp_path / "triton").chmod(0o777)
    find_other_caches()
    assert "pipeline-" in os.environ["TRITON_CACHE_DIR"] and "TRITON_CACHE_DIR" in caplog.text
    (tmp_path / "tmp" / f"pipeline-{os.getuid()}").chmod(0o777)
    find_other_caches()
    monkeypatch.setenv("MPLCONFIGDIR", "/proc/nothing")
    find_other_caches()
    found = Path(os.environ["MPLCONFIGDIR"])
    assert found.parent == tmp_path / "tmp" and found.name.startswith("matplotlib-")
