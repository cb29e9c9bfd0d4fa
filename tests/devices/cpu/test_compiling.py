"""Whoever waits for a compiler is told so, once."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest

from pipeline.devices.cpu.kernels import llvm_intrinsics
from tests.support.messages import mentions

KERNELS = "from numba import njit\nkept = njit(cache=True)(lambda value: value)\nown = njit(lambda value: value)\n"


def test_a_job_that_compiles_kernels_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    some_kernels = importlib.import_module("some_kernels")
    monkeypatch.setattr(llvm_intrinsics.listener, "said", False)
    caplog.set_level(logging.INFO, logger=llvm_intrinsics.__name__)
    assert some_kernels.own(1) == 1 and caplog.messages == []  # in each process: nobody waits for it
    assert (some_kernels.kept(1), some_kernels.kept(2.0)) == (1, 2.0)  # for each type
    (message,) = caplog.messages
    assert mentions(message, "compiling CPU pipeline precompile")
