"""A tick on two ranks that SIGTERM ends says so, and the next one completes what it had begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.retraining.registry import Registry
from pipeline.runtime.process.exit_codes import REQUEUE
from tests.retraining.streams import JOB_WORDS, write_window

ROWS = 8_000
LOOSE = ["gate.calibration_min=0.7", "gate.calibration_max=1.3"]


def _start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    words = [f"source={folder / 'source'}", f"run_dir={folder / 'work'}", f"registry.path={folder / 'registry'}"]
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "agent",
        "--nproc-per-node",
        "2",
        "-m",
        "pipeline",
        "retrain",
    ]
    with open(log, "wb") as file:
        return subprocess.Popen([*command, *words, *JOB_WORDS, *LOOSE], stdout=file, stderr=file, env=dict(os.environ))


@pytest.mark.campaign
@pytest.mark.parametrize("line", [pytest.param("samples/s", id="training"), pytest.param("torch.export", id="export")])
def test_a_tick_of_two_ranks_that_sigterm_ends_is_completed_by_the_next(tmp_path: Path, line: str) -> None:
    for number in (1, 2):
        write_window(tmp_path / "source", number, ROWS)
    first, log = _start(tmp_path, tmp_path / "first.log"), tmp_path / "first.log"
    until = time.monotonic() + 240
    while line not in log.read_text() and first.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(120) == REQUEUE, log.read_text()
    assert "Traceback" not in log.read_text() and "Connection closed" not in log.read_text()
    assert Registry(str(tmp_path / "registry")).pointer() is None
    second = _start(tmp_path, tmp_path / "second.log")
    assert second.wait(300) == 0, (tmp_path / "second.log").read_text()
    champion = Registry(str(tmp_path / "registry")).champion()
    assert champion is not None and champion.artifact is not None
    assert Registry(str(tmp_path / "registry")).verify(champion) == ("", champion.size_bytes)
