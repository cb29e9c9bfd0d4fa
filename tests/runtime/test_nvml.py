"""FBGEMM's CUDA build finds the library that it links on a host where no driver has installed it."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.runtime.nvml import FUNCTIONS, LIBRARY, MACHINES, stub

LIKE_FBGEMM = (
    f"import ctypes\nlibrary = ctypes.CDLL({LIBRARY!r})\nprint([getattr(library, name)() for name in {FUNCTIONS!r}])\n"
)


def _has_driver() -> bool:
    code = f"import ctypes; ctypes.CDLL({LIBRARY!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_fbgemm_loads_without_a_driver(tmp_path: Path) -> None:
    """The stand-in for fbgemm_gpu loads the library by its name and calls all that FBGEMM links."""
    if _has_driver():
        pytest.skip("this host has NVIDIA's driver")
    (tmp_path / "fbgemm_gpu.py").write_text(LIKE_FBGEMM)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); count = len(sys.meta_path)\n"
        "import pipeline, fbgemm_gpu\n"
        "assert len(sys.meta_path) == count, sys.meta_path\n"
        "assert 'ctypes' in sys.modules and not hasattr(fbgemm_gpu.library, 'nvmlInit')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == str([12] * len(FUNCTIONS))


def test_importing_the_pipeline_alone_loads_nothing() -> None:
    code = "import pipeline, sys; assert 'ctypes' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_the_stub_of_each_machine_differs_by_its_number_and_its_code(machine: str, number: int) -> None:
    content, code = stub(machine), MACHINES[machine][1]
    assert struct.unpack_from("<H", content, 18) == (number,)
    assert content.count(code) == 1
    assert content[20:64] == stub("x86_64")[20:64]


def test_the_real_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.runtime import nvml

    monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: name)
    monkeypatch.setattr(nvml, "stub", lambda machine: pytest.fail("the driver has the library"))
    assert nvml.load_stub_without_driver() is False
