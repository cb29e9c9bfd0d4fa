"""The shadow GPU's libraries: compiled once, into a folder of one's own; and what activating it refuses."""

from __future__ import annotations

import ctypes
import stat
from pathlib import Path

import pytest

from pipeline.extras import shadow
from pipeline.extras.shadow import stubs
from pipeline.runtime.errors import ConfigError
from tests.support.messages import mentions


def test_libraries_are_compiled_once_into_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = stubs.build()
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    shim = ctypes.CDLL(str(folder / "libshadow_shim.so"))
    shim.shadow_set_device_count(3)
    assert shim._ZN3c104cuda12device_countEv() == 3
    monkeypatch.setattr(stubs, "_compiler", lambda: pytest.fail("compiled again"))
    assert stubs.build() == folder


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stubs.build().parent.chmod(0o777)
    with pytest.raises(ConfigError) as refused:
        stubs.build()
    assert mentions(str(refused.value), "777 700 shadow")


def test_a_process_that_has_imported_torch_cannot_get_shadow_gpus() -> None:
    with pytest.raises(ConfigError) as refused:
        shadow.activate(num_gpus=1)
    assert mentions(str(refused.value), "torch shadow.activate()")
    assert not shadow.is_active()


def test_a_card_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        shadow.activate(name="h100_80")
    assert mentions(str(refused.value), "h100_80 h100_80gb a100_40gb")
