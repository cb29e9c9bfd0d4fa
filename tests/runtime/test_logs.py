"""metrics.jsonl survives what a crash leaves in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.runtime.logs import MetricsWriter


def _steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', "\n\n", '{"kind": "train"}\n', "7\n", "null\n", "\x00" * 40])
def test_a_torn_or_blank_line_is_dropped_and_the_whole_lines_are_kept(tmp_path: Path, torn: str) -> None:
    """Such a line made every resume fail with a JSONDecodeError, until somebody edited the file."""
    writer = MetricsWriter(str(tmp_path))
    for step in (10, 20, 30):
        writer.write("train", step, {"loss": 0.5})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    resumed = MetricsWriter(str(tmp_path), resume_step=20)
    assert _steps(tmp_path) == [10, 20]
    resumed.write("train", 30, {"loss": 0.4})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    resumed.drop_after(20)  # a rollback reads the same file
    resumed.close()
    assert _steps(tmp_path) == [10, 20]


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path))
    for step in (10, 20):
        writer.write("train", step, {"loss": 0.5})
    writer.close()
    MetricsWriter(str(tmp_path), resume_step=10).close()
    assert _steps(tmp_path) == [10]
    MetricsWriter(str(tmp_path)).close()
    assert _steps(tmp_path) == []


@pytest.mark.parametrize("tensorboard", [True, False])
def test_event_files_of_tensorboard_are_a_choice(tmp_path: Path, tensorboard: bool) -> None:
    writer = MetricsWriter(str(tmp_path), tensorboard=tensorboard)
    writer.write("train", 10, {"loss": 0.5})
    writer.drop_after(10)
    writer.close()
    assert _steps(tmp_path) == [10]
    assert (tmp_path / "tensorboard").exists() == tensorboard
