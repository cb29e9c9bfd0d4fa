"""Faults 28, 30: mistakes in the config, and secrets that must not get out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.runtime.process.exit_codes import FAILED, USER_ERROR
from tests.faults.conftest import FaultRecorder
from tests.faults.runs import Run

SEED = 28


@pytest.fixture(scope="module", params=[12, pytest.param(50, marks=pytest.mark.campaign)])
def told(
    request: pytest.FixtureRequest, prepared_clicks: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, object]], Path]:
    folder = tmp_path_factory.mktemp("mistakes")
    command = [
        sys.executable,
        "-m",
        "tests.faults.mistakes",
        str(SEED),
        str(request.param),
        prepared_clicks,
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *answers, last = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert last == {"torch": False, "valid": 0}
    return answers, folder


def test_every_mistake_is_one_line_and_nothing_is_written(
    told: tuple[list[dict[str, object]], Path], fault: FaultRecorder
) -> None:
    answers, folder = told
    count = len(answers)
    assert count in (12, 50)
    for answer in answers:
        text = str(answer["told"])
        assert answer["code"] == USER_ERROR, answer
        assert text.startswith("error: ") and text.count("\n") == 1 and len(text) > 20, answer
    assert not (folder / "run").exists()
    fault(
        28,
        f"{count} of {count} ended with code 2 and one line, before torch was loaded; nothing written",
        count=count,
        seed=SEED,
    )


@pytest.mark.campaign
def test_a_secret_gets_nowhere(prepared_clicks: str, tmp_path: Path, fault: FaultRecorder) -> None:
    """In the environment, in an exception and its URL, and in a URL of the config."""
    canary = "CANARY-7f3a9c-secret"
    message = f"403 for https://me:{canary}@store/key?X-Amz-Signature={canary}; the key was {canary}"
    env = {"AWS_SECRET_ACCESS_KEY": canary, "PLANTED_MESSAGE": message}
    run = Run(prepared_clicks, tmp_path)
    code, output = run.finish({"at": "input", "step": 25, "do": "raise"}, ranks=1, env=env)
    assert code == FAILED
    assert "RuntimeError: 403 for https://***@store/key" in output  # what happened is told
    assert "RuntimeError: 403 for" in run.log(0, 0)
    refused = Run(prepared_clicks, tmp_path / "refused", (f"data.path=s3://me:{canary}@bucket/data",))
    words = [sys.executable, "-m", "pipeline", "train", *refused.words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env={**os.environ, **env})
    code, text = done.returncode, done.stdout + done.stderr
    assert code == USER_ERROR and "holds a credential" in text and not refused.run_dir.exists()
    kinds = {"events.out": 0, "manifest.json": 0, "distcp": 0, "config.yaml": 0, "stderr.log": 0, "error.json": 0}
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert canary.encode() not in path.read_bytes(), path
        for kind in kinds:
            kinds[kind] += kind in path.name
    assert all(kinds.values()), kinds
    assert canary not in output + text
    num_files = sum(path.is_file() for path in tmp_path.rglob("*"))
    fault(30, f"0 hits in the output and in {num_files} files: logs, run folder, checkpoints, TensorBoard", count=4)
