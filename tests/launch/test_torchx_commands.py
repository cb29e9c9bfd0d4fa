"""Nobody reads a traceback of TorchX: what goes wrong in a command is a line and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchx.schedulers.local_scheduler import SignalException

from launch.torchx_commands import errors_as_lines
from tests.launch.launching import START_S

TORCHX = [sys.executable, "-m", "torchx.cli.main", "--log_level", "WARNING"]


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (ValueError("no such job"), "error: no such job\n", 2),
        (KeyError("state"), "error: KeyError: 'state' (LOGLEVEL=DEBUG shows where)\n", 1),
        (RuntimeError("two\nlines of https://me:pw@host/"), "error: RuntimeError: two lines of https://***@host/ (LOGLEVEL=DEBUG shows where)\n", 1),
        (KeyboardInterrupt(), "interrupted; the job runs on\n", 130),
        (SignalException("x", signal.SIGINT), "interrupted; run the same command again to resume\n", 130),
        (SignalException("x", signal.SIGTERM), "ended by SIGTERM; run the same command again to resume\n", 75),
    ],
)  # fmt: skip
def test_an_error_is_a_line_and_a_code(
    error: BaseException, said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop, errors_as_lines("; the job runs on"):
        raise error
    assert (capsys.readouterr().err, stop.value.code) == (said, code)


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    with pytest.raises(KeyError), errors_as_lines():
        raise KeyError("state")


@pytest.mark.campaign
def test_ctrl_c_of_a_local_job_saves_and_says_one_line(
    installed: dict[str, str], prepared_clicks: str, tmp_path: Path
) -> None:
    words = [
        "experiment=quickstart", "hardware=cpu", "planner=torchrec", f"data.path={prepared_clicks}", f"run_dir={tmp_path}/run",
        "trainer.global_batch_size=256", "trainer.evaluate_batch_size=512", "trainer.epochs=1000",
    ]  # fmt: skip
    with open(tmp_path / "said", "w") as said:
        job = subprocess.Popen(
            [*TORCHX, "run", "-s", "local_cwd", "pipeline.train", "-j", "1x2", "--", *words],
            env={**os.environ, **installed, "OMP_NUM_THREADS": "1"}, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + START_S
        while " step 50/" not in (tmp_path / "said").read_text() and time.monotonic() < until:
            time.sleep(0.2)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(60) == 130
    text = (tmp_path / "said").read_text()
    assert "Traceback" not in text and text.endswith("interrupted; run the same command again to resume\n")
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))
